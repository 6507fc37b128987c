"""Sessions over a pool, whose requests are chains of numbers."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from penstock.core.types.requests import Request, SessionAction, SessionControl
from penstock.core.wire import HashArray
from penstock.kv.pool import BlockPool, Pins
from penstock.kv.sessions.config import SessionsConfig
from penstock.kv.sessions.sessions import Sessions
from penstock.testing.engines.probe import make_request
from tests.support.manual_clock import ManualClock

OPEN = SessionControl(action=SessionAction.OPEN)
CLOSE = SessionControl(action=SessionAction.CLOSE)


class SessionScene:
    """A pool whose requests are chains of numbers; equal leading numbers are equal blocks."""

    def __init__(self, num_blocks: int = 16, **config: Any) -> None:
        self.pool = BlockPool(num_blocks, 4)
        self.pins = Pins(self.pool, lambda: None)
        self.clock = ManualClock()
        self.told: list[int] = []
        self.sessions = Sessions(
            self.pool,
            self.pins,
            SessionsConfig(**config),
            on_change=lambda: self.told.append(1),
            clock=self.clock,
        )
        self.served = 0

    @staticmethod
    def hashes(numbers: Sequence[int]) -> HashArray:
        chained = [hash(tuple(numbers[: end + 1])) & (2**64 - 1) for end in range(len(numbers))]
        return np.array([(low, low ^ 5) for low in chained], dtype=np.uint64).reshape(-1, 2)

    def begin(self, session: str | None, control: SessionControl | None = None, tenant: str = "") -> Request:
        self.served += 1
        request = replace(
            make_request(f"r{self.served}", [1]), session=session, session_control=control, tenant=tenant
        )
        self.sessions.begin(request)
        return request

    def begin_speculative(self) -> Request:
        """Begin a request without a session, whose answer is to be kept for its next turn."""
        self.served += 1
        request = replace(make_request(f"r{self.served}", [1]), speculative_prefill=True)
        self.sessions.begin(request)
        return request

    def run(
        self, request: Request, numbers: Sequence[int], num_prompt: int | None = None, *, is_done: bool = True
    ) -> int:
        """Compute a begun request's blocks, as a scheduler does; returns how many were cached."""
        hashes = self.hashes(numbers)
        hits = self.pool.match(hashes)
        self.pool.acquire(hits)
        fresh = self.pool.allocate(len(hashes) - len(hits))
        assert fresh is not None
        parent = int(hashes[len(hits) - 1, 0]) if hits else None
        self.pool.commit(fresh, hashes[len(hits) :], parent)
        self.sessions.hold(
            request,
            hashes,
            num_prompt=len(numbers) if num_prompt is None else num_prompt,
            num_shared=len(hits),
        )
        self.pool.release([*hits, *fresh])
        self.sessions.end(request, is_done=is_done)
        self.check()
        return len(hits)

    def ask(
        self,
        session: str | None,
        numbers: Sequence[int],
        control: SessionControl | None = None,
        **options: Any,
    ) -> int:
        return self.run(self.begin(session, control), numbers, **options)

    def check(self) -> None:
        self.sessions.check()
        self.pool.check()

    def cached(self, numbers: Sequence[int]) -> int:
        return len(self.pool.match(self.hashes(numbers)))

    def flood(self, start: int = 1000) -> None:
        """Let a request without a session use all blocks that it can get."""
        request = self.begin(None)
        self.run(request, list(range(start, start + self.pool.num_available)))
