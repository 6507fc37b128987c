"""Harness of the transport suite: local memory, and memory of another agent or storage of the same agent."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, AsyncExitStack, nullcontext
from types import TracebackType
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from penstock.core.descriptors import Region
from penstock.core.errors import TransferRefused
from penstock.seams import Transport
from penstock.transfer import Peer, Registration, RemoteRegion, TransferAgent, TransferConfig, TransferOp

Bytes = NDArray[np.uint8]


class TransportHarness(Protocol):
    """Both ends of a transport under test. Enter it; leaving closes everything."""

    @property
    def agent(self) -> TransferAgent:
        """The agent that posts transfers."""
        ...

    @property
    def peer(self) -> Peer | None:
        """The peer that owns the remote memory; None if `agent` itself does."""
        ...

    @property
    def local(self) -> Registration: ...

    @property
    def remote(self) -> Registration | RemoteRegion: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def read_local(self) -> Bytes: ...

    def write_local(self, data: Bytes) -> None: ...

    async def read_remote(self) -> Bytes:
        """Read the remote content, if possible without the transport under test."""
        ...

    async def write_remote(self, data: Bytes) -> None: ...


class TwoAgents:
    """Two agents in this process, linked by sockets, so that transports work as between processes.

    Subclass it for memory other than numpy arrays.
    """

    agent: TransferAgent
    owner: TransferAgent
    """The agent that owns the remote memory."""
    peer: Peer
    local: Registration
    remote: RemoteRegion
    owned: Registration
    """The `remote` region at its owner."""

    def __init__(
        self,
        transports: Callable[[], Iterable[Transport]],
        *,
        size_bytes: int,
        config: TransferConfig | None = None,
    ) -> None:
        """Make a harness; entering it starts the agents.

        Args:
            transports: makes the transport under test, for one agent.
            size_bytes: size of the memory on each side.
            config: config of both agents.
        """
        self.size_bytes = size_bytes
        self._config = config or TransferConfig(listen=("unix",))
        self._transports = transports
        self._stack = AsyncExitStack()
        self._here: Bytes
        self._there: Bytes

    async def __aenter__(self) -> Self:
        self.agent = await self._stack.enter_async_context(self.make_agent("reader"))
        self.owner = await self._stack.enter_async_context(self.make_agent("owner"))
        self._here, here = self.make_memory()
        self._there, there = self.make_memory()
        self.local = self.agent.register(here, "here")
        self.owned = self.owner.register(there, "there")
        self.peer = await self.agent.connect(self.owner.metadata([self.owned]))
        self.remote = self.peer.region("there")
        if not self.peer.routes:
            await self._stack.aclose()
            raise TransferRefused(f"the transport under test does not reach: {self.peer.unreachable}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    def make_agent(self, name: str) -> TransferAgent:
        return TransferAgent(name, self._config, transports=self._transports())

    def make_memory(self) -> tuple[Bytes, object]:
        """Make one side's memory; return a view of it, and the object to register."""
        memory = np.zeros(self.size_bytes, np.uint8)
        return memory, memory

    def endless_transfers(self) -> AbstractContextManager[object]:
        """Keep transfers posted within this context under way until something ends them.

        The default does nothing: then `large_bytes` must take longer than the message that ends the transfer.
        """
        return nullcontext()

    def read_local(self) -> Bytes:
        return self._here.copy()

    def write_local(self, data: Bytes) -> None:
        self._here[:] = data

    async def read_remote(self) -> Bytes:
        return self._there.copy()

    async def write_remote(self, data: Bytes) -> None:
        self._there[:] = data


async def differ(harness: TransportHarness) -> None:
    """Fill both sides so that they differ in every byte, and every byte that moves is seen."""
    size = harness.local.region.size_bytes
    harness.write_local(np.full(size, 1, np.uint8))
    await harness.write_remote(np.full(size, 2, np.uint8))


async def fill(harness: TransportHarness, seed: int) -> tuple[Bytes, Bytes]:
    """Put random bytes on both sides; return copies."""
    random = np.random.default_rng(seed)
    size = harness.local.region.size_bytes
    here = random.integers(0, 256, size, np.uint8)
    there = random.integers(0, 256, size, np.uint8)
    harness.write_local(here)
    await harness.write_remote(there)
    return here, there


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
