"""The contenders: Penstock's transports between two processes or within one, and memcpy."""

import asyncio
import ctypes
import sys
import time
from collections import deque
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Protocol

import numpy as np

from benchmarks.transfer.shapes import POOL_BYTES, Shape, config_for, make_pool
from penstock.core.errors import TransferError
from penstock.transfer import (
    FileRegion,
    ObjectRegion,
    Peer,
    PreparedTransfer,
    Region,
    Registration,
    RemoteRegion,
    TransferAgent,
    TransferConfig,
    TransferOp,
)

READY_S = 60
OPS = (TransferOp.WRITE, TransferOp.READ)

Pools = tuple[Registration, Registration | RemoteRegion]
"""Local and remote."""


class Contender(Protocol):
    """Moves a shape repeatedly."""

    @property
    def name(self) -> str: ...

    async def move(self, op: TransferOp, shape: Shape, repeats: int) -> list[float]:
        """Move the shape `repeats` + 1 times, and give the seconds of each move but the first."""
        ...

    async def idle_share(self, seconds: float) -> float | None:
        """Measure the idle CPU share of the contender's other process; None without one."""
        ...


class Ours:
    """A transport of this library; the memory at the other end is another process's, or the agent's own."""

    def __init__(self, name: str, agent: TransferAgent, peer: Peer | None, pools: Pools) -> None:
        """Take two pools that are registered."""
        self.name = name
        self.agent = agent
        self.local, self.remote = pools
        self.owner: asyncio.subprocess.Process | None = None
        self._peer = peer
        self._prepared: dict[str, PreparedTransfer] = {}

    def prepare(self, shape: Shape) -> PreparedTransfer:
        here, there = shape.blocks()
        ours, theirs = self.local.blocks(here, shape.size_bytes), self.remote.blocks(there, shape.size_bytes)
        return self.agent.prepare(ours, theirs, self._peer)

    async def move(self, op: TransferOp, shape: Shape, repeats: int) -> list[float]:
        prepared = self._prepared.get(shape.name)
        if prepared is None:
            prepared = self._prepared[shape.name] = self.prepare(shape)
        seconds = []
        for _ in range(repeats + 1):
            began_s = time.perf_counter()
            handle = prepared.post(op)
            if handle.is_pending:
                await handle.wait()
            seconds.append(time.perf_counter() - began_s)
            if handle.error is not None:
                raise handle.error
        return seconds[1:]

    async def idle_share(self, seconds: float) -> float | None:
        if self.owner is None:
            return None
        assert self.owner.stdin
        assert self.owner.stdout
        self.owner.stdin.write(f"{seconds}\n".encode())
        return float(await self.owner.stdout.readline())


class Memcpy:
    """The limit: libc's memcpy in a loop by one thread, less the time of an empty loop."""

    name = "memcpy"

    def __init__(self) -> None:
        """Take two pools of private memory."""
        self._source = np.ones(POOL_BYTES, np.uint8)
        self._target = np.ones(POOL_BYTES, np.uint8)
        self._copy = ctypes.PyDLL(None).memcpy
        self._copy.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_size_t)

    async def move(self, op: TransferOp, shape: Shape, repeats: int) -> list[float]:
        here, there = shape.blocks()
        ours, theirs = self._source.ctypes.data + here * shape.size_bytes, there * shape.size_bytes
        targets, sources = (self._target.ctypes.data + theirs).tolist(), ours.tolist()
        if op is TransferOp.READ:
            targets, sources = sources, targets
        seconds = []
        for _ in range(repeats + 1):
            full_s, empty_s = (
                self._loop_s(targets, sources, [size] * shape.count) for size in (shape.size_bytes, 0)
            )
            seconds.append(full_s - empty_s)
            await asyncio.sleep(0)
        return seconds[1:]

    async def idle_share(self, seconds: float) -> float | None:
        del seconds
        return None

    def _loop_s(self, targets: list[int], sources: list[int], sizes: list[int]) -> float:
        began_s = time.perf_counter()
        deque(map(self._copy, targets, sources, sizes), maxlen=0)
        return time.perf_counter() - began_s


async def between_processes(
    stack: AsyncExitStack, name: str, transport: str, listen: str, memory: str
) -> Ours:
    """Start an owner, and connect to it by one transport alone.

    Raises:
        TransferError: this transport does not work here; the text says why.
    """
    agent = await stack.enter_async_context(TransferAgent("initiator", config_for(transport, listen)))
    if agent.unavailable:
        raise TransferError(agent.unavailable[transport])
    owner = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.transfer.owner", transport, listen, memory,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=1 << 20,
    )  # fmt: skip
    stack.push_async_callback(_end, owner)
    assert owner.stdout
    async with asyncio.timeout(READY_S):
        metadata = bytes.fromhex((await owner.stdout.readline()).decode())
    peer = await agent.connect(metadata)
    if not peer.routes:
        raise TransferError("; ".join(peer.unreachable.values()))
    ours = Ours(name, agent, peer, (agent.register(make_pool(memory)), peer.region("pool")))
    ours.owner = owner
    return ours


async def within_a_process(stack: AsyncExitStack) -> Ours:
    """Make two agents here, between which transport `memory` copies."""
    own = TransferConfig(listen=("memory",), transports=("memory",))
    owner = await stack.enter_async_context(TransferAgent("owner", own))
    agent = await stack.enter_async_context(TransferAgent("initiator", own))
    owner.register(make_pool("private"), "pool")
    peer = await agent.connect(owner.metadata())
    return Ours("memory", agent, peer, (agent.register(make_pool("private")), peer.region("pool")))


async def to_storage(stack: AsyncExitStack, name: str, directory: Path) -> Ours:
    """Register a file, or objects in a directory.

    Raises:
        PenstockError: this transport does not work here; the text says why.
    """
    agent = await stack.enter_async_context(TransferAgent("initiator", TransferConfig(transports=(name,))))
    stored: Region = (
        FileRegion(directory / "file", POOL_BYTES)
        if name == "file"
        else ObjectRegion(f"file://{directory}", POOL_BYTES, prefix="objects", object_bytes=1 << 20)
    )
    pool = agent.register(make_pool("shared"))  # aligned, as O_DIRECT wants it
    return Ours(name, agent, None, (pool, agent.register(stored)))


async def _end(owner: asyncio.subprocess.Process) -> None:
    if owner.returncode is None:
        owner.kill()
    await owner.wait()
