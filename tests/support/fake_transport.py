"""A transport between agents of one process that moves nothing: its transfers end, hang or fail as a test says."""

import asyncio
from collections.abc import Sequence
from typing import Any

from penstock.core.descriptors import TransferCost
from penstock.transfer.transports.memory import MemoryTransport


class FakeChannel:
    """Its runs wait until `free` is set, and raise `fault`."""

    def __init__(self, start_s: float = 1.0) -> None:
        self.start_s = start_s
        self.free = asyncio.Event()
        self.free.set()
        self.fault: Exception | None = None
        self.runs = 0

    def refusal(self, op: Any, local: Any, remote: Any) -> str | None:
        return None

    def cost(self, op: Any) -> TransferCost:
        return TransferCost(start_s=self.start_s, range_s=0, bytes_per_s=1e12)

    def prepare(self, op: Any, pairs: Any, *, checksum: bool) -> "FakeChannel":
        return self

    def run_now(self) -> bool:
        return False

    async def run(self) -> None:
        self.runs += 1
        await self.free.wait()
        if self.fault is not None:
            raise self.fault

    def forget(self, region_id: int) -> None: ...

    async def close(self) -> None: ...


class FakeTransport(MemoryTransport):
    """Connects by one channel; `users` is what may still use memory after a run."""

    def __init__(self, name: str = "memory", start_s: float = 1.0) -> None:
        super().__init__(threads=1, inline_bytes_max=0)
        self.name = name
        self.channel = FakeChannel(start_s)
        self.users: Sequence[asyncio.Future[None]] = ()

    async def connect(self, link: Any, contact: Any, regions: Any) -> Any:
        return self.channel

    def lingering(self, user: Any) -> Any:
        return self.users
