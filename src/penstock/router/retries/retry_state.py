"""A request's retry state: its losses and refusals so far, and whether it is retried."""

import math

from penstock.core.errors import Overloaded, Parked, PenstockError, StaleRoute, Unavailable
from penstock.core.ids import WorkerId
from penstock.core.log import get_logger
from penstock.core.types.requests import Request
from penstock.router.retries.retry_guard import RetryGuard

_BACKOFF_S = 0.1
_DOUBLINGS_MAX = 16

_log = get_logger()


class RetryState:
    """One request's losses and refusals. A method that ends the request raises the error that its reader gets.

    After a loss the request goes on elsewhere, however often, as long as it makes progress. A refusal before any token costs
    one of `refusals_max` and one retry of the budget; `unavailable_max` answers in a row that a worker cannot serve it for now end it before its first token. Consecutive losses that the request may have caused lead to isolation,
    and then to quarantine of its content.
    """

    def __init__(self, request: Request, retry_guard: RetryGuard) -> None:
        self.migrations = 0
        """Times it went on elsewhere because its worker was lost."""
        self.lost: set[WorkerId] = set()
        """Workers lost with this request: tried again only where no other worker is ready."""
        self.avoided: set[WorkerId] = set()
        """Workers that refused this request."""
        self.was_stale = False
        """Whether its last route was stale: the next route replaces it and is not counted again."""
        self.last_refusal: Overloaded | None = None
        self.last_problem: Unavailable | None = None
        """Why a worker could not serve it for now."""
        self._request = request
        self._retry_guard = retry_guard
        self._refusals = 0
        self._unavailable = 0  # answers in a row that a worker cannot serve it for now
        self._stale_routes = 0
        self._suspicions = 0  # losses of workers that it may have caused, since it last got on
        self._losses = 0  # of any kind, since then
        self._stalled_since_s: float | None = None
        self._is_expected = False

    @property
    def needs_isolation(self) -> bool:
        """Whether one more suspicious loss puts its content in quarantine."""
        return self._suspicions + 1 >= self._retry_guard.config.deaths_max

    def on_progress(self) -> None:
        """Note progress: earlier losses were not caused by this request."""
        self._suspicions = self._losses = self._unavailable = 0
        self._stalled_since_s = None

    @property
    def may_be_stale(self) -> bool:
        """Whether a worker may return it once more because other routers' requests came first."""
        return self._stale_routes < self._retry_guard.config.stale_routes_max

    def on_stale_route(self) -> None:
        """Note that a worker returned it because its route was stale."""
        self.was_stale = True
        self._stale_routes += 1
        self._retry_guard.metrics.stale_routes.inc()

    def on_loss(self, worker_id: WorkerId, *, is_suspect: bool) -> None:
        """Note that its worker was lost; `is_suspect` where the request may have caused that."""
        self.lost.add(worker_id)
        if is_suspect:
            self._suspicions += 1

    def on_unavailable(self, worker_id: WorkerId, problem: Unavailable, *, has_begun: bool = False) -> None:
        """Note that a worker cannot serve it for now. An answer that `has_begun` is bounded by `migrate` alone.

        Raises:
            Unavailable: too many in a row could not.
        """
        self.lost.add(worker_id)
        self._unavailable += 1
        self.last_problem = problem
        if not has_begun and self._unavailable > self._retry_guard.config.unavailable_max:
            self._retry_guard.metrics.migrations.labels("unavailable").inc()
            raise Unavailable(
                f"request {self._request.request_id}: {self._unavailable} workers in a row could not serve it"
                f" (router.retries.unavailable_max); the last one: {problem.message}",
                retry_after_s=problem.retry_after_s or 1.0,
            ) from problem

    def on_refusal(self, worker_id: WorkerId, refusal: Overloaded, now_s: float) -> None:
        """Note that a worker did not take the request.

        Raises:
            Overloaded: it was refused too often, or the retry budget is spent.
        """
        retry_guard = self._retry_guard
        retry_guard.metrics.refusals.inc()
        self.avoided.add(worker_id)
        self._refusals += 1
        self.last_refusal = refusal
        if self._refusals > retry_guard.config.refusals_max:
            raise refusal
        if not retry_guard.budget.spend(now_s):
            raise refusal

    def about_to_move(self, *, is_expected: bool = True) -> None:
        """Note whether it will `migrate` soon. Safe twice."""
        if self._is_expected is not is_expected:
            self._is_expected = is_expected
            self._retry_guard.pace.expect(1 if is_expected else -1)

    def migrate(self, cause: PenstockError, now_s: float, output_tokens: int) -> float:
        """Count a move to another worker, and give the seconds to wait before it.

        Raises:
            Unavailable: it has lost workers for too long without progress, or its content is quarantined now.
        """
        request, retry_guard = self._request, self._retry_guard
        self.about_to_move(is_expected=False)
        if self._suspicions >= retry_guard.config.deaths_max:
            self._quarantine(cause, now_s)
        if self._stalled_since_s is None:
            self._stalled_since_s = now_s
        stalled_s = now_s - self._stalled_since_s
        if stalled_s > retry_guard.migrations.stalled_s_max:
            retry_guard.metrics.migrations.labels("stalled").inc()
            _log.warning(
                "request_given_up",
                request_id=request.request_id,
                migrations=self.migrations,
                stalled_s=stalled_s,
                error=cause.message,
            )
            raise Unavailable(
                f"request {request.request_id}: its servers failed again and again for {stalled_s:.0f} s, in which it got"
                " next to nothing (at most router.migrations.stalled_s_max); send it again",
                retry_after_s=1.0,
            ) from cause
        retry_guard.metrics.migrations.labels("moved").inc()
        self.migrations += 1
        _log.debug(
            "request_migrated",
            request_id=request.request_id,
            tokens=output_tokens,
            migrations=self.migrations,
            error=cause.message,
        )
        wait_s = retry_guard.pace.depart(now_s) + retry_guard.rng.uniform(0, retry_guard.migrations.jitter_s)
        if self._losses:
            backoff_s = _BACKOFF_S * 2.0 ** min(self._losses - 1, _DOUBLINGS_MAX)
            wait_s += min(backoff_s, retry_guard.migrations.backoff_s_max)
        self._losses += 1
        return wait_s

    def _quarantine(self, cause: PenstockError, now_s: float) -> None:
        retry_guard, quarantine_s = self._retry_guard, self._retry_guard.config.quarantine_s
        retry_guard.quarantine.put(self._request, now_s)
        retry_guard.metrics.migrations.labels("quarantined").inc()
        _log.warning(
            "request_quarantined",
            request_id=self._request.request_id,
            workers_lost=self._suspicions,
            quarantine_s=quarantine_s,
            error=cause.message,
        )
        raise quarantined(quarantine_s) from cause


def quarantined(remaining_s: float) -> Unavailable:
    """Make the error for content in quarantine."""
    return Unavailable(
        "the servers that took this prompt failed one after another, perhaps because of it, so it is refused for"
        f" {math.ceil(remaining_s)} s; send it again after that, or change it",
        retry_after_s=remaining_s,
    )


def is_move(interruption: PenstockError) -> bool:
    """Say whether an attempt ended as its worker was lost, rather than refused, returned or parked."""
    return not isinstance(interruption, (Overloaded, StaleRoute, Parked))
