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
    and then to quarantine of its content. A worker counts once, and again only where other answers got on there since.
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
        self.last_problem: PenstockError | None = None
        """Why the last worker could not serve it."""
        self._request = request
        self._retry_guard = retry_guard
        self._refusals = 0
        self._unavailable = 0  # answers in a row that a worker cannot serve it for now
        self._stale_routes = 0
        self._suspicions = 0  # losses of workers that it may have caused, since it last got on
        self._suspected_at: dict[WorkerId, int] = {}  # how many answers had got on there by then
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
        self._suspected_at.clear()
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

    def on_loss(self, worker_id: WorkerId, cause: PenstockError, *, suspect_at: int | None) -> None:
        """Note that its worker was lost, or failed a step.

        Args:
            worker_id: of the worker.
            cause: what is known of it.
            suspect_at: how many answers got on at the worker, where the request may have caused the loss; else None. A worker
                that fails every request is no reason to suspect this one.
        """
        self.lost.add(worker_id)
        self.last_problem = cause
        if suspect_at is not None and suspect_at != self._suspected_at.get(worker_id):
            self._suspected_at[worker_id] = suspect_at
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
                f"request {self._request.request_id}: no worker could serve it in {self._unavailable} tries, at"
                f" {len(self.lost)} workers (router.retries.unavailable_max); the last one said: {problem.message}",
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

    def migrate(self, cause: PenstockError, now_s: float, output_tokens: int, *, is_elsewhere: bool) -> float:
        """Count a move, and give the seconds to wait before it; `is_elsewhere`: a worker that has not failed it is ready.

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
                f" next to nothing (at most router.migrations.stalled_s_max); send it again; the last one said: {cause.message}",
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
        if self._losses or not is_elsewhere:
            backoff_s = _BACKOFF_S * 2.0 ** min(max(self._losses - 1, 0), _DOUBLINGS_MAX)
            wait_s += min(backoff_s, retry_guard.migrations.backoff_s_max)
        self._losses += 1
        return wait_s

    def _quarantine(self, cause: PenstockError, now_s: float) -> None:
        retry_guard, quarantine_s = self._retry_guard, self._retry_guard.config.quarantine_s
        retry_guard.quarantine.put(self._request, now_s, cause.message)
        retry_guard.metrics.migrations.labels("quarantined").inc()
        _log.warning(
            "request_quarantined",
            request_id=self._request.request_id,
            workers_lost=self._suspicions,
            quarantine_s=quarantine_s,
            error=cause.message,
        )
        raise quarantined(quarantine_s, cause.message) from cause


def quarantined(remaining_s: float, reason: str) -> Unavailable:
    """Make the error for content in quarantine; `reason`: what is known of the last loss."""
    return Unavailable(
        "the servers that took this prompt failed one after another, perhaps because of it, so it is refused for"
        f" {math.ceil(remaining_s)} s; send it again after that, or change it; the last one said: {reason}",
        retry_after_s=remaining_s,
    )


def is_move(interruption: PenstockError) -> bool:
    """Say whether an attempt ended as its worker was lost, rather than refused, returned or parked."""
    return not isinstance(interruption, (Overloaded, StaleRoute, Parked))
