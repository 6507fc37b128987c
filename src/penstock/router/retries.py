"""Retries: what went wrong for a request, and whether, when and where it is tried again; bounds over all requests of a frontend."""

import hashlib
import math
import random
from collections import OrderedDict, deque
from collections.abc import Callable

from penstock.core.errors import Overloaded, Parked, PenstockError, StaleRoute, Unavailable
from penstock.core.ids import WorkerId
from penstock.core.log import get_logger
from penstock.core.types.requests import Request
from penstock.router.config import MigrationConfig, RetryConfig
from penstock.router.metrics import RouterMetrics


class PoisonIsolation:
    """Suspects of killing workers run one at a time, so that the next loss shows the culprit: one slot, and a queue for it.

    One event loop owns it.
    """

    def __init__(self) -> None:
        self._holder: object | None = None
        self._waiting: dict[object, Callable[[], None]] = {}

    def enter(self, suspect: object, wake: Callable[[], None]) -> bool:
        """Take the slot if it is free and no suspect waits before; else `wake` is called once it may be free.

        The caller calls `leave` in the end in either case.
        """
        if self._holder is suspect:
            return True
        self._waiting.setdefault(suspect, wake)
        if self._holder is not None or next(iter(self._waiting)) is not suspect:
            return False
        del self._waiting[suspect]
        self._holder = suspect
        return True

    def leave(self, suspect: object) -> None:
        """Give the slot back, or stop waiting. Safe twice, and for requests that never asked."""
        self._waiting.pop(suspect, None)
        if self._holder is suspect:
            self._holder = None
        if self._holder is None and self._waiting:
            next(iter(self._waiting.values()))()

    @property
    def is_empty(self) -> bool:
        """Whether no suspect has the slot or waits for it."""
        return self._holder is None and not self._waiting

    def check(self) -> None:
        assert self._holder not in self._waiting, "isolation: the holder does not wait"


class MigrationPace:
    """Gives each request of a lost worker its time to go on elsewhere: `at_once` of them now, the others spread over `spread_s`.

    So thousands of streams of a lost host go on within seconds, and the loop serves other requests between two of them. No request
    is refused: open requests are bounded, and each has its deadline. One event loop owns it.
    """

    def __init__(self, config: MigrationConfig) -> None:
        self._config = config
        self.expected = 0
        """Requests that will ask for their time soon."""
        self._at_once = float(config.at_once)
        self._seen_s = 0.0
        self._departures_s: deque[float] = deque()  # of waiting requests, in order

    def expect(self, change: int) -> None:
        """Count a request that will ask for its time (1), or that no longer will (-1)."""
        self.expected += change

    def depart(self, now_s: float) -> float:
        """Give one request its time to go on, in seconds from now."""
        at_once, spread_s = self._config.at_once, self._config.spread_s
        if not spread_s:
            return 0.0
        waiting = self._departures_s
        while waiting and waiting[0] <= now_s:
            waiting.popleft()
        if not waiting:
            since_s = now_s - self._seen_s
            self._at_once = min(self._at_once + since_s * at_once / spread_s, at_once)
            self._seen_s = now_s
            if self._at_once >= 1.0:
                self._at_once -= 1.0
                return 0.0
        last_s = waiting[-1] if waiting else now_s
        waiting.append(last_s + spread_s / max(len(waiting) + self.expected, at_once))
        self._seen_s = waiting[-1]  # nothing is saved up while some wait
        return waiting[-1] - now_s

    def check(self) -> None:
        assert self._at_once <= self._config.at_once, f"{self._at_once} may go at once"
        assert self.expected >= 0, f"{self.expected} are expected"
        assert list(self._departures_s) == sorted(self._departures_s), "one after the other"


class PromptQuarantine:
    """A bounded set of prompts by hash, each with the time until which it is refused, and why."""

    def __init__(self, config: RetryConfig) -> None:
        self._config = config
        self._refused: OrderedDict[bytes, tuple[float, str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._refused)

    def put(self, request: Request, now_s: float, reason: str) -> None:
        """Refuse this request's content from now on."""
        content = _content(request)
        self._refused[content] = now_s + self._config.quarantine_s, reason
        self._refused.move_to_end(content)
        if len(self._refused) > self._config.quarantined_max:
            self._refused.popitem(last=False)

    def refusal(self, request: Request, now_s: float) -> tuple[float, str] | None:
        """Give the seconds that this content is still refused, and why; None if it is not."""
        while self._refused and next(iter(self._refused.values()))[0] <= now_s:
            self._refused.popitem(last=False)
        if not self._refused:  # nearly always: nothing to hash
            return None
        until_s, reason = self._refused.get(_content(request), (now_s, ""))
        return None if until_s == now_s else (until_s - now_s, reason)

    def check(self) -> None:
        assert len(self._refused) <= self._config.quarantined_max, (
            f"{len(self._refused)} contents in quarantine"
        )
        ends = [until_s for until_s, _ in self._refused.values()]
        assert ends == sorted(ends), "quarantine: the first to be put is the first to be let out"


def _content(request: Request) -> bytes:
    digest = hashlib.blake2b(request.model.encode(), digest_size=16)
    digest.update(b"\0" + request.salt + b"\0" + request.token_ids)
    return digest.digest()


class RetryGuard:
    """The pace of lost requests, the budget of refused ones, and isolation and quarantine of prompts that kill workers."""

    def __init__(
        self, config: RetryConfig, migrations: MigrationConfig, *, metrics: RouterMetrics, rng: random.Random
    ) -> None:
        self.config = config
        self.migrations = migrations
        self.budget = RetryBudget(config)
        self.pace = MigrationPace(migrations)
        self.quarantine = PromptQuarantine(config)
        self.isolation = PoisonIsolation()
        self.metrics = metrics
        self.rng = rng

    def check(self) -> None:
        """Raise AssertionError where a bound is broken."""
        self.budget.check()
        self.pace.check()
        self.quarantine.check()
        self.isolation.check()

    def check_at_rest(self) -> None:
        """Raise AssertionError where ended requests left something."""
        assert not self.pace.expected, f"{self.pace.expected} are about to move"
        assert self.isolation.is_empty, "a suspect has the slot, or waits for it"


class RetryBudget:
    """A token bucket of retries, so that full workers are not overrun. Time and opened requests fill it, up to `burst`."""

    def __init__(self, config: RetryConfig) -> None:
        self._config = config
        self._balance = float(config.burst)
        self._seen_s = 0.0

    def earn(self) -> None:
        """Add what an opened request earns."""
        self._balance = min(self._balance + self._config.per_request, self._config.burst)

    def spend(self, now_s: float) -> bool:
        """Spend one retry; False where none is left."""
        config = self._config
        self._balance = min(self._balance + (now_s - self._seen_s) * config.per_s, config.burst)
        self._seen_s = now_s
        if self._balance < 1.0:
            return False
        self._balance -= 1.0
        return True

    def check(self) -> None:
        assert 0 <= self._balance <= self._config.burst, (
            f"{self._balance} tries of at most {self._config.burst}"
        )


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
