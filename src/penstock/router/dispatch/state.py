"""The parts of one dispatcher that its requests share, and the journeys of the latest requests."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import msgspec

from penstock.core.errors import DeadlineExceeded, Overloaded, PenstockError, RequestError, Unavailable
from penstock.core.ids import RequestId
from penstock.core.types.requests import Request
from penstock.core.wire import num_tokens
from penstock.router.config import RouterConfig
from penstock.router.dispatch.progress import Progress, ReadableRequests
from penstock.router.fair_queue import retry_after_s
from penstock.router.fleet.fleet import Fleet
from penstock.router.fleet.member import Condition
from penstock.router.metrics import RouterMetrics
from penstock.router.request_queue import RequestQueue
from penstock.router.retries import RetryGuard, quarantined
from penstock.router.router import Router

_KEPT_MAX = 256
_LEGS_MAX = 16


class LegPart(StrEnum):
    """Which phases of a request a worker serves."""

    WHOLE = "whole"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(slots=True)
class Leg:
    """A request at one worker; times are of the event loop, None before it came to that."""

    worker: str
    part: LegPart
    sent_s: float
    first_token_s: float | None = None
    ended_s: float | None = None

    def view(self, opened_s: float) -> "LegView":
        first_s, ended_s = self.first_token_s, self.ended_s
        return LegView(
            worker=self.worker,
            part=self.part,
            sent_s=self.sent_s - opened_s,
            first_token_s=None if first_s is None else first_s - opened_s,
            ended_s=None if ended_s is None else ended_s - opened_s,
        )


class LegView(msgspec.Struct, frozen=True, kw_only=True):
    """A leg, in seconds after the request was opened; None: not yet."""

    worker: str
    part: LegPart
    sent_s: float
    first_token_s: float | None
    ended_s: float | None


class Journey(msgspec.Struct, frozen=True, kw_only=True):
    """One request's way, as people see it.

    Attributes:
        age_s: seconds since it was opened, which is once its prompt was tokenized.
        seconds: from there to its end, or so far.
        outcome: as in `penstock_router_requests_total`; None while it is under way.
        cached_tokens: of its prompt, as its first worker found them; None before that told.
        queued_s: until it was first sent to a worker, or so far.
        legs: oldest first; several are a prefill and a decode worker, or migrations.
    """

    request_id: RequestId
    model: str
    tenant: str
    age_s: float
    seconds: float
    outcome: str | None
    prompt_tokens: int
    cached_tokens: int | None
    output_tokens: int
    queued_s: float
    migrations: int
    legs: tuple[LegView, ...]


class JourneyLog:
    """Notes where one request goes. One task owns it."""

    __slots__ = ("_legs", "_opened_s", "_request")

    def __init__(self, request: Request, opened_s: float) -> None:
        self._request = request
        self._opened_s = opened_s
        self._legs: list[Leg] = []

    def add(self, leg: Leg) -> None:
        """Note that it was sent to a worker; of very many legs the first and the latest are kept."""
        if len(self._legs) >= _LEGS_MAX:
            del self._legs[1]
        self._legs.append(leg)

    def journey(
        self, now_s: float, outcome: str | None, progress: Progress | None, migrations: int
    ) -> Journey:
        """Describe it at loop time `now_s`; with an outcome, it ends now."""
        request, seconds, legs = self._request, now_s - self._opened_s, self._legs
        return Journey(
            request_id=request.request_id,
            model=request.adapter or request.model,
            tenant=request.tenant,
            age_s=seconds,
            seconds=seconds,
            outcome=outcome,
            prompt_tokens=num_tokens(request.token_ids) - request.num_emitted,
            cached_tokens=None if progress is None else progress.cached_tokens,
            output_tokens=request.num_emitted if progress is None else progress.output_tokens,
            queued_s=legs[0].sent_s - self._opened_s if legs else seconds,
            migrations=migrations,
            legs=tuple(leg.view(self._opened_s) for leg in legs),
        )


class Journeys:
    """Keeps the latest 256 requests that have ended. One event loop owns it."""

    def __init__(self) -> None:
        self._ended: deque[tuple[float, Journey]] = deque(maxlen=_KEPT_MAX)

    def end(self, journey: Journey, now_s: float) -> None:
        """Keep a request that ends now."""
        self._ended.append((now_s, journey))

    def latest(self, most: int, under_way: Iterable[Journey], now_s: float) -> tuple[Journey, ...]:
        """Give the latest requests: those under way first, then the newest that have ended."""
        newest = [journey for journey, _ in zip(under_way, range(most), strict=False)]
        ended = (_aged(journey, now_s - at_s) for at_s, journey in reversed(self._ended))
        newest += [journey for journey, _ in zip(ended, range(most - len(newest)), strict=False)]
        return tuple(newest)

    def of(self, answer_id: str, under_way: Iterable[Journey], now_s: float) -> tuple[Journey, ...]:
        """Give a request, or all choices of an answer, oldest first; empty where they are not known."""
        ended = (_aged(journey, now_s - at_s) for at_s, journey in self._ended if _is_of(journey, answer_id))
        return (*ended, *(journey for journey in under_way if _is_of(journey, answer_id)))


def _aged(journey: Journey, since_s: float) -> Journey:
    return msgspec.structs.replace(journey, age_s=journey.seconds + since_s)


def _is_of(journey: Journey, answer_id: str) -> bool:
    request_id = journey.request_id
    return request_id == answer_id or request_id.rpartition("-")[0] == answer_id


class EndableRequest(Protocol):
    """An open request."""

    def fail(self, error: PenstockError) -> None: ...
    def journey(self) -> Journey: ...


@dataclass(slots=True)
class DispatcherState:
    """One dispatcher's parts; `requests` are open. One event loop owns it."""

    config: RouterConfig
    fleet: Fleet
    router: Router
    request_queue: RequestQueue
    retry_guard: RetryGuard
    metrics: RouterMetrics
    hash_key: bytes
    requests: dict[RequestId, EndableRequest] = field(default_factory=dict)
    journeys: Journeys = field(default_factory=Journeys)
    readable: ReadableRequests = field(default_factory=ReadableRequests)

    def admit(self, request: Request, now_s: float) -> None:
        """Refuse a request that may not be opened.

        Raises:
            Overloaded: too many are open.
            RequestError: its id is in use.
            Unavailable: its content is in quarantine.
        """
        if len(self.requests) >= self.config.open_requests_max:
            raise Overloaded(
                f"{len(self.requests)} requests are under way here, the limit (router.open_requests_max); try again later",
                retry_after_s=retry_after_s(self.request_queue.drain_s(now_s)),
            )
        if request.request_id in self.requests:
            raise RequestError(
                f"request_id: {request.request_id} is under way already; give each request its own",
                param="request_id",
            )
        refusal = self.retry_guard.quarantine.refusal(request, now_s)
        if refusal is not None:
            self.metrics.quarantined.inc()
            raise quarantined(*refusal)

    def ended(self, request: Request, journey: Journey, now_s: float, *, is_whole: bool) -> None:
        """Count and keep a request that has ended; `is_whole`: with the end of its answer."""
        pool = self.fleet.pools.get(request.model)
        if pool is not None and is_whole:
            pool.traffic.ended(journey.output_tokens - request.num_emitted, now_s)
        assert journey.outcome is not None, "it has ended"
        metrics = self.metrics
        metrics.cached_tokens.inc(journey.cached_tokens or 0)
        metrics.ended(journey.outcome).inc()
        metrics.request_s.observe(journey.seconds)
        metrics.open_requests.set(len(self.requests))
        self.journeys.end(journey, now_s)

    def no_worker(self, request: Request, problem: PenstockError | None) -> Unavailable:
        """Make the error for a model without a ready worker; `problem` is what the last one said that could not serve the request."""
        models = ", ".join(sorted(self.fleet.models())) or "none"
        prefill = [
            view.name
            for view in self.fleet.workers()
            if view.condition is Condition.PREFILL_ONLY and view.model == request.model
        ]
        advice = "start a worker"
        if prefill:
            advice += f", make one of the {len(prefill)} that only compute prompts answer (penstock role {prefill[0]} decode)"
        return Unavailable(
            f"model {request.adapter or request.model}: no worker was ready within {self.config.no_worker_wait_s:g} s; models"
            f" with ready workers: {models}; {advice}, or try again later"
            + ("" if problem is None else f"; the last worker of this request said: {problem.message}"),
            retry_after_s=1.0,
        )

    def check_refusals(self, request: Request, last: Overloaded | None) -> None:
        """Raise Overloaded where every ready worker has refused a request; `last` is the last refusal."""
        pool = self.fleet.pools.get(request.model)
        if last is not None and pool is not None and pool.has_ready:
            raise Overloaded(
                f"model {request.model}: every worker that is ready has refused this request; the last one: {last.message}",
                retry_after_s=last.retry_after_s or 1.0,
            )

    @staticmethod
    def late(request: Request, output_tokens: int) -> DeadlineExceeded:
        """Make the error for a request past its deadline."""
        return DeadlineExceeded(
            f"request {request.request_id}: {request.deadline_s:g} s have passed and {output_tokens} of at most"
            f" {request.sampling.max_tokens} tokens are there; allow more time or ask for fewer tokens"
        )
