"""Connected frontends, their requests, and what each frontend learns of the others' requests.

The worker itself does not know how much of a waiting prompt is cached, but the router that sent it looked that up. So each
request's expected prefill work is kept here until its first token, and each router is told the sum of the others'.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import msgspec

from penstock.core.errors import PenstockError
from penstock.core.ids import RequestId
from penstock.core.types.load import WorkerLoad
from penstock.core.types.requests import Delta, FinishReason, Request
from penstock.core.wire import num_tokens
from penstock.seams import FrontendSink


@dataclass(slots=True)
class Prefill:
    """Prefill work: prompt tokens to compute, and pairs of such a token with a token that it attends to."""

    tokens: int = 0
    pairs: int = 0

    def add(self, other: "Prefill") -> None:
        self.tokens += other.tokens
        self.pairs += other.pairs

    def subtract(self, other: "Prefill") -> None:
        self.tokens -= other.tokens
        self.pairs -= other.pairs


@dataclass(slots=True, eq=False)
class Frontend:
    """One connected frontend.

    sent:    requests and prefetches that it sent, refused ones included
    taken:   requests accepted
    prefill: prefill work left for its requests without a first token
    """

    sink: FrontendSink
    sent: int = 0
    taken: int = 0
    requests: set[RequestId] = field(default_factory=set)
    prefill: Prefill = field(default_factory=Prefill)

    def push_error(self, request_id: RequestId, error: PenstockError) -> None:
        """Tell it that a request has ended with an error."""
        self.sink.push(
            (Delta(request_id=request_id, finish_reason=FinishReason.ERROR, error=error.to_info()),)
        )

    def push_cancelled(self, request_id: RequestId) -> None:
        """Tell it that a background request has ended, since another came or was there."""
        self.sink.push((Delta(request_id=request_id, finish_reason=FinishReason.CANCELLED),))


@dataclass(slots=True, eq=False)
class Running:
    """An accepted request. `prefill` is the work that its router expects; None after the first token."""

    request: Request
    frontend: Frontend
    prefill: Prefill | None
    deadline: asyncio.TimerHandle | None = None


class Frontends:
    """The connected frontends and their unfinished requests. One event loop owns it."""

    def __init__(self, now_s: Callable[[], float] | None = None) -> None:
        """Make an empty set; `now_s` is the clock, None: the event loop's."""
        self.idle = asyncio.Event()
        """Set while there is no request."""
        self.all: tuple[Frontend, ...] = ()
        """The connected frontends."""
        self.idle.set()
        self.requests: dict[RequestId, Running] = {}
        self.background: Running | None = None
        """The request that runs only as long as it is alone."""
        self._by_sink: dict[FrontendSink, Frontend] = {}
        self._prefill = Prefill()
        self._taken = 0
        self._clock = now_s
        self._waiting: dict[RequestId, float] = {}  # requests without a token -> arrival time, oldest first

    def __len__(self) -> int:
        return len(self._by_sink)

    @cached_property
    def _now_s(self) -> Callable[[], float]:
        """The clock. The loop is looked up once: the lookup takes a system call, half a microsecond."""
        return self._clock or asyncio.get_running_loop().time

    def connect(self, sink: FrontendSink) -> Frontend:
        self._by_sink[sink] = frontend = Frontend(sink)
        self.all = tuple(self._by_sink.values())
        return frontend

    def at(self, sink: FrontendSink) -> Frontend:
        return self._by_sink[sink]

    def connected(self, sink: FrontendSink) -> Frontend | None:
        """Return the frontend of a connection; None if the connection has ended."""
        return self._by_sink.get(sink)

    def disconnect(self, sink: FrontendSink) -> Frontend | None:
        """Remove a frontend; the caller must `forget` each of its requests."""
        frontend = self._by_sink.pop(sink, None)
        self.all = tuple(self._by_sink.values())
        return frontend

    def take(self, request: Request, frontend: Frontend) -> Running:
        """Add an accepted request, until it is forgotten."""
        prefill = _expected(request)
        self.requests[request.request_id] = running = Running(request, frontend, prefill)
        if request.is_background:
            self.background = running
        frontend.requests.add(request.request_id)
        frontend.taken += 1
        frontend.prefill.add(prefill)
        self._taken += 1
        self._prefill.add(prefill)
        self._waiting[request.request_id] = self._now_s()
        self.idle.clear()
        return running

    def prefilled(self, running: Running) -> None:
        """Drop a request's prefill work: it has its first token, or has ended. Safe twice."""
        prefill, running.prefill = running.prefill, None
        if prefill is not None:
            running.frontend.prefill.subtract(prefill)
            self._prefill.subtract(prefill)
            del self._waiting[running.request.request_id]

    def forget(self, request_id: RequestId) -> Running | None:
        """Remove a request that has ended; None if it is unknown."""
        running = self.requests.pop(request_id, None)
        if running is not None:
            self.prefilled(running)
            if running is self.background:
                self.background = None
            running.frontend.requests.discard(request_id)
            if running.deadline is not None:
                running.deadline.cancel()
            if not self.requests:
                self.idle.set()
        return running

    def announce(self, request_ids: Sequence[RequestId]) -> None:
        """Send each frontend an empty delta for its requests that the next step computes for the first time."""
        parts: dict[Frontend, list[Delta]] = {}
        for request_id in request_ids:
            running = self.requests.get(request_id)
            if running is not None:
                parts.setdefault(running.frontend, []).append(Delta(request_id=request_id))
        for frontend, deltas in parts.items():
            frontend.sink.push(deltas)

    def unknown_arrivals(self, request: Request, frontend: Frontend) -> int:
        """Count requests of other frontends that the request's router did not know of when it chose this worker.

        0 if the request does not say what its router knew, or no prompt of another frontend is left to compute.
        """
        known = request.known_peer_arrivals
        if known is None or self._prefill.tokens == frontend.prefill.tokens:
            return 0
        return self._taken - frontend.taken - known

    def load_for(self, frontend: Frontend, load: WorkerLoad) -> WorkerLoad:
        """Complete a load report with the figures for this frontend and of its peers."""
        return msgspec.structs.replace(
            load,
            accepted_requests=frontend.sent,
            peers=len(self._by_sink) - 1,
            peer_requests=len(self.requests) - len(frontend.requests),
            peer_prefill_tokens=self._prefill.tokens - frontend.prefill.tokens,
            peer_prefill_pairs=self._prefill.pairs - frontend.prefill.pairs,
            peer_arrivals=self._taken - frontend.taken,
            oldest_wait_s=self._now_s() - next(iter(self._waiting.values())) if self._waiting else 0.0,
        )

    def push_load(self, load: WorkerLoad) -> None:
        """Send a load report to every frontend."""
        for frontend in self.all:
            self.push_load_to(frontend, load)

    def push_load_to(self, frontend: Frontend, load: WorkerLoad) -> None:
        """Send a load report to one frontend."""
        frontend.sink.push_load(self.load_for(frontend, load))

    def check(self) -> None:
        """Raise AssertionError if sums and requests disagree."""
        assert self.all == tuple(self._by_sink.values()), "all: the connected frontends"
        by_frontend = {r: f for f in self._by_sink.values() for r in f.requests}
        assert by_frontend == {r: running.frontend for r, running in self.requests.items()}, (
            "requests: each belongs to the frontend that sent it, which is connected"
        )
        assert self.background is None or list(self.requests.values()) == [self.background], "not alone"
        waiting = {request_id for request_id, running in self.requests.items() if running.prefill is not None}
        assert self._waiting.keys() == waiting, "waiting: those without a token"
        assert self.idle.is_set() == (not self.requests), "idle: set exactly while nothing runs"
        left = {frontend: Prefill() for frontend in self._by_sink.values()}
        for running in self.requests.values():
            if running.prefill is not None:
                left[running.frontend].add(running.prefill)
        for frontend, prefill in left.items():
            assert frontend.prefill == prefill, f"prefill: {frontend.prefill} noted, {prefill} is left"
        total = Prefill()
        for prefill in left.values():
            total.add(prefill)
        assert self._prefill == total, f"prefill: {self._prefill} noted, {total} is left"


def _expected(request: Request) -> Prefill:
    """Return the prefill work that a request's router expects: at least one token."""
    prompt = num_tokens(request.token_ids)
    cached = min(max(request.expected_cached_tokens, 0), prompt - 1)
    tokens = prompt - cached
    return Prefill(tokens, tokens * cached + tokens * (tokens + 1) // 2)
