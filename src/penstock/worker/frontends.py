"""Whose requests a worker has, and what each frontend is told of the others'.

A worker counts a waiting prompt whole: what of it is cached shows when it runs. The router that sent it has looked
that up. So what routers expect is kept here until the first token, and each of them is told the sum of the others'.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import msgspec

from penstock.core.ids import RequestId
from penstock.core.types.load import WorkerLoad
from penstock.core.types.requests import Delta, Request
from penstock.core.wire import num_tokens
from penstock.seams import FrontendSink


@dataclass(slots=True)
class Prefill:
    """Prompt tokens to compute, and the pairs of one of them and one that it attends to."""

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
    """One connection. `sent` counts its requests, refused ones included, `taken` those that were not refused.

    `prefill` is the sum of what its requests have to compute before their first tokens.
    """

    sink: FrontendSink
    sent: int = 0
    taken: int = 0
    requests: set[RequestId] = field(default_factory=set)
    prefill: Prefill = field(default_factory=Prefill)


@dataclass(slots=True, eq=False)
class Running:
    """A request. `prefill` is what its router expects it to compute, None once it has a token."""

    request: Request
    frontend: Frontend
    prefill: Prefill | None
    deadline: asyncio.TimerHandle | None = None


class Frontends:
    """The frontends that are connected, and their requests that have not ended. One event loop owns it."""

    def __init__(self, now_s: Callable[[], float] | None = None) -> None:
        """Begin with none; `now_s` gives the time, None for the event loop's."""
        self.idle = asyncio.Event()
        """Set while there is no request."""
        self.idle.set()
        self.requests: dict[RequestId, Running] = {}
        self._by_sink: dict[FrontendSink, Frontend] = {}
        self._prefill = Prefill()
        self._taken = 0
        self._clock = now_s
        self._everybody: tuple[Frontend, ...] = ()
        self._waiting: dict[
            RequestId, float
        ] = {}  # since when (loop time), those without a token, oldest first

    def __len__(self) -> int:
        return len(self._by_sink)

    @cached_property
    def _now_s(self) -> Callable[[], float]:
        """What tells the time; the loop is asked for once, as asking takes a system call, half a microsecond."""
        return self._clock or asyncio.get_running_loop().time

    def connect(self, sink: FrontendSink) -> Frontend:
        self._by_sink[sink] = frontend = Frontend(sink)
        self._everybody = tuple(self._by_sink.values())
        return frontend

    def at(self, sink: FrontendSink) -> Frontend:
        return self._by_sink[sink]

    def connected(self, sink: FrontendSink) -> Frontend | None:
        """Give who is behind a connection, None where it has ended."""
        return self._by_sink.get(sink)

    def everybody(self) -> tuple[Frontend, ...]:
        return self._everybody

    def disconnect(self, sink: FrontendSink) -> Frontend | None:
        """Let a frontend go; its requests are still to be forgotten, each."""
        frontend = self._by_sink.pop(sink, None)
        self._everybody = tuple(self._by_sink.values())
        return frontend

    def take(self, request: Request, frontend: Frontend) -> Running:
        """Keep a request of a frontend's until it is forgotten."""
        prefill = _expected(request)
        self.requests[request.request_id] = running = Running(request, frontend, prefill)
        frontend.requests.add(request.request_id)
        frontend.taken += 1
        frontend.prefill.add(prefill)
        self._taken += 1
        self._prefill.add(prefill)
        self._waiting[request.request_id] = self._now_s()
        self.idle.clear()
        return running

    def prefilled(self, running: Running) -> None:
        """Expect no more computing of its prompt: it has its first token, or has ended. Safe twice."""
        prefill, running.prefill = running.prefill, None
        if prefill is not None:
            running.frontend.prefill.subtract(prefill)
            self._prefill.subtract(prefill)
            del self._waiting[running.request.request_id]

    def forget(self, request_id: RequestId) -> Running | None:
        """Let a request go that has ended, in whatever way; returns None for one that is not there."""
        running = self.requests.pop(request_id, None)
        if running is not None:
            self.prefilled(running)
            running.frontend.requests.discard(request_id)
            if running.deadline is not None:
                running.deadline.cancel()
            if not self.requests:
                self.idle.set()
        return running

    def tell_begun(self, request_ids: Sequence[RequestId]) -> None:
        """Tell each frontend which of its requests the step that comes is the first to compute."""
        parts: dict[Frontend, list[Delta]] = {}
        for request_id in request_ids:
            running = self.requests.get(request_id)
            if running is not None:
                parts.setdefault(running.frontend, []).append(Delta(request_id=request_id))
        for frontend, deltas in parts.items():
            frontend.sink.push(deltas)

    def unknown_arrivals(self, request: Request, frontend: Frontend) -> int:
        """Count the requests of others that its router did not know of when it chose this worker.

        0 where it does not say what it knew, and while no prompt of others is left to compute.
        """
        known = request.known_peer_arrivals
        if known is None or self._prefill.tokens == frontend.prefill.tokens:
            return 0
        return self._taken - frontend.taken - known

    def load_for(self, frontend: Frontend, load: WorkerLoad) -> WorkerLoad:
        """Put into a load what is this frontend's, and what is its peers'."""
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

    def check(self) -> None:
        """Raise AssertionError where sums and requests disagree."""
        assert self._everybody == tuple(self._by_sink.values()), "everybody: those who are connected"
        by_frontend = {r: f for f in self._by_sink.values() for r in f.requests}
        assert by_frontend == {r: running.frontend for r, running in self.requests.items()}, (
            "requests: each belongs to the frontend that sent it, which is connected"
        )
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
    """Say what a request's router expects it to compute: at least one token."""
    prompt = num_tokens(request.token_ids)
    cached = min(max(request.expected_cached_tokens, 0), prompt - 1)
    tokens = prompt - cached
    return Prefill(tokens, tokens * cached + tokens * (tokens + 1) // 2)
