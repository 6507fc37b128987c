"""Harness of the suite for storage transports: memory of one agent, and a region of its storage."""

from collections.abc import Callable
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

import numpy as np

from penstock.core.descriptors import Region
from penstock.seams import Transport
from penstock.testing.transports.harness import Bytes
from penstock.transfer import Registration, TransferAgent, TransferConfig, TransferOp


class OwnStorage:
    """One agent that is both ends. All storage is written at the start, since unwritten storage cannot be read."""

    agent: TransferAgent
    peer = None
    local: Registration
    remote: Registration

    def __init__(self, transport: Transport, region: Region) -> None:
        """Make a harness; entering it starts the agent.

        Args:
            transport: the transport under test.
            region: the storage; its size is the size of the memory on each side.
        """
        self._transport = transport
        self._region = region
        self._here = np.zeros(region.size_bytes, np.uint8)
        self._stack = AsyncExitStack()

    def on_exit(self, clean_up: Callable[[], None]) -> None:
        """Call this when the harness is left."""
        self._stack.callback(clean_up)

    async def __aenter__(self) -> Self:
        self.agent = await self._stack.enter_async_context(
            TransferAgent("reader", TransferConfig(listen=()), transports=[self._transport])
        )
        self.local = self.agent.register(self._here)
        self.remote = self.agent.register(self._region)
        await self.write_remote(np.zeros_like(self._here))
        self.agent.counters.written_bytes.clear()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    def read_local(self) -> Bytes:
        return self._here.copy()

    def write_local(self, data: Bytes) -> None:
        self._here[:] = data

    async def read_remote(self) -> Bytes:
        data = np.empty_like(self._here)
        await self._move(TransferOp.READ, data)
        return data

    async def write_remote(self, data: Bytes) -> None:
        await self._move(TransferOp.WRITE, data)

    async def _move(self, op: TransferOp, data: Bytes) -> None:
        aside = self.agent.register(data)
        await self.agent.post(op, aside.ranges(), self.remote.ranges()).wait()
        await self.agent.deregister(aside)
