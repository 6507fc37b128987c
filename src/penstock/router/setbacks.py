"""What has gone wrong for one request so far, and whether it is tried again."""

import math

from penstock.core.errors import Overloaded, PenstockError, Unavailable
from penstock.core.ids import WorkerId
from penstock.core.log import get_logger
from penstock.core.types import Request
from penstock.router.brakes import Brakes

_log = get_logger()


class Setbacks:
    """One request's losses and refusals. Every method that may be the last straw raises what its reader gets.

    A lost worker costs one of `migrations_max`, a refusal before any token one of `refusals_max`, and each a retry
    of the budget. Losses that the request may have caused lead to probation, and then its content to quarantine.
    """

    def __init__(self, request: Request, brakes: Brakes) -> None:
        self.migrations = 0
        """Times it went on elsewhere because its worker was lost."""
        self.lost: set[WorkerId] = set()
        """Workers lost under it: better than none, if they are back."""
        self.avoided: set[WorkerId] = set()
        """Workers that said themselves that they will not go on with it."""
        self.was_outrun = False
        """Whether it was sent back since it was last routed: its next route is the same one, chosen anew."""
        self.last_refusal: Overloaded | None = None
        self._request = request
        self._brakes = brakes
        self._refusals = 0
        self._outruns = 0
        self._suspicions = 0  # losses of workers that it may have caused

    @property
    def needs_probation(self) -> bool:
        """Whether one more loss that it may have caused puts its content in quarantine."""
        return self._suspicions + 1 >= self._brakes.config.deaths_max

    @property
    def may_be_outrun(self) -> bool:
        """Whether it may be sent back once more as requests of other routers came first."""
        return self._outruns < self._brakes.config.outruns_max

    def on_outrun(self) -> None:
        """Note that it was sent back, having done nothing wrong."""
        self.was_outrun = True
        self._outruns += 1
        self._brakes.metrics.outruns.inc()

    def on_loss(self, worker_id: WorkerId, *, is_suspect: bool) -> None:
        """Note that its worker was lost, and whether it may have been the cause."""
        self.lost.add(worker_id)
        if is_suspect:
            self._suspicions += 1

    def on_refusal(self, worker_id: WorkerId, refusal: Overloaded, now_s: float) -> None:
        """Note that a worker did not take the request.

        Raises:
            Overloaded: it was refused too often, or too much is tried again already.
        """
        brakes = self._brakes
        brakes.metrics.refusals.inc()
        self.avoided.add(worker_id)
        self._refusals += 1
        self.last_refusal = refusal
        if self._refusals > brakes.config.refusals_max:
            raise refusal
        if brakes.budget.take(now_s, wait_s_max=0.0) is None:
            raise refusal

    def migrate(self, cause: PenstockError, now_s: float, output_tokens: int) -> float:
        """Count a move to another worker; returns how many seconds to wait before it.

        Raises:
            Unavailable: it moved too often, is to be quarantined, or too much is tried again already.
        """
        if self._suspicions >= self._brakes.config.deaths_max:
            self._quarantine(cause, now_s)
        request, brakes, retries = self._request, self._brakes, self._brakes.config
        if self.migrations >= retries.migrations_max:
            brakes.metrics.migrations.labels("too_many").inc()
            _log.warning(
                "request_given_up",
                request_id=request.request_id,
                migrations=self.migrations,
                error=cause.message,
            )
            raise Unavailable(
                f"request {request.request_id}: moved {self.migrations} times already as its servers failed, the"
                " limit (router.retries.migrations_max); send it again",
                retry_after_s=1.0,
            ) from cause
        delay_s = brakes.budget.take(now_s, wait_s_max=retries.wait_s_max)
        if delay_s is None:
            brakes.metrics.migrations.labels("no_budget").inc()
            raise Unavailable(
                f"request {request.request_id}: its worker was lost, and so were too many others lately (retries"
                f" are limited to {retries.per_s:g} a second); send it again",
                retry_after_s=retries.wait_s_max,
            ) from cause
        brakes.metrics.migrations.labels("moved").inc()
        self.migrations += 1
        _log.debug(
            "request_migrated",
            request_id=request.request_id,
            tokens=output_tokens,
            migrations=self.migrations,
            error=cause.message,
        )
        return delay_s + brakes.rng.uniform(0, retries.jitter_s)

    def _quarantine(self, cause: PenstockError, now_s: float) -> None:
        brakes, quarantine_s = self._brakes, self._brakes.config.quarantine_s
        brakes.quarantine.put(self._request, now_s)
        brakes.metrics.migrations.labels("quarantined").inc()
        _log.warning(
            "request_quarantined",
            request_id=self._request.request_id,
            workers_lost=self._suspicions,
            quarantine_s=quarantine_s,
            error=cause.message,
        )
        raise quarantined(quarantine_s) from cause


def quarantined(remaining_s: float) -> Unavailable:
    """Word the refusal of a content in quarantine."""
    return Unavailable(
        "the servers that took this prompt failed one after another, perhaps because of it, so it is refused for"
        f" {math.ceil(remaining_s)} s; send it again after that, or change it",
        retry_after_s=remaining_s,
    )
