"""Two workers' KV memory, linked by one transport: blocks of one are a `PeerSource` of the other."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

import numpy as np

from penstock.core.ids import PinId, WorkerId
from penstock.core.types.instances import EngineInfo
from penstock.core.types.kv import KvLayout
from penstock.core.wire import HashArray, encode
from penstock.kv.measured import MeasuredSpeed
from penstock.seams import Transport
from penstock.testing.kv_source import BLOCK_BYTES, BLOCK_SIZE, DEVICE_BLOCKS, Memory
from penstock.transfer import Arena, TransferAgent, TransferConfig
from penstock.worker.kv_transfer.reader import (
    PIN_MESSAGES,
    KvRegions,
    Origin,
    PeerSource,
    PinCheck,
    PinGrown,
    PinHeld,
    Reader,
)

LAYOUT = KvLayout(
    num_layers=2,
    num_kv_heads=2,
    head_dim=BLOCK_BYTES // (2 * 2 * 2 * 4 * BLOCK_SIZE),
    dtype="float32",
    element_bytes=4,
    block_size=BLOCK_SIZE,
).split(num_blocks=DEVICE_BLOCKS)
INFO = EngineInfo(
    block_size=BLOCK_SIZE,
    total_blocks=DEVICE_BLOCKS,
    context_length=DEVICE_BLOCKS * BLOCK_SIZE,
    max_batch_tokens=64,
    max_running_requests=1,
    kv_bytes_per_block=BLOCK_BYTES,
    kv_layout=LAYOUT,
)


class _Side:
    """One worker's memory and agent."""

    def __init__(self, name: str, config: TransferConfig, transports: Iterable[Transport]) -> None:
        self.agent = TransferAgent(name, config, transports=transports)
        arena = Arena.create(DEVICE_BLOCKS * BLOCK_BYTES)
        self.arena = arena
        self.memory: Memory = arena.array[: DEVICE_BLOCKS * BLOCK_BYTES].reshape(DEVICE_BLOCKS, BLOCK_BYTES)
        self.regions = KvRegions(INFO)


class PeerStage:
    """A `testing.kv_source.SourceStage`.

    Attributes:
        source: the owner's blocks.
        memory: of the reader.
        is_pinned: what the owner answers when it is asked whether blocks were pinned.
        is_hung: whether it answers nothing.
    """

    def __init__(self, owner: _Side, reader: _Side) -> None:
        self.memory = reader.memory
        self.is_pinned = True
        self.is_hung = False
        self.reader = Reader(reader.agent, reader.regions, checksum=True)
        self.source = PeerSource(np.zeros((0, 2), "<u8"), self.reader, MeasuredSpeed())
        self._owner = owner
        self._reader_side = reader

    async def put(self, hashes: HashArray, content: Memory) -> None:
        """Have the owner hold a prompt, in its blocks from 3 on."""
        self._owner.memory[3 : 3 + len(content)] = content
        self.source = source = PeerSource(hashes, self.reader, MeasuredSpeed())
        peer = await self._reader_side.agent.connect(self._owner.agent.metadata())
        source.origin = Origin(WorkerId(1), self._owner.regions.source(b""), peer)
        block_ids = np.arange(3, 3 + len(content), dtype="<u4").tobytes()
        source.growth.add(PinGrown(pin_id=PinId(1), read_id=0, first=0, block_ids=block_ids, is_whole=False))

    async def answer(self) -> None:
        """Answer the reader's questions."""
        async for name, payload in self._owner.agent.notifications():
            message = PIN_MESSAGES.decode(payload)
            assert isinstance(message, PinCheck)
            if self.is_hung:
                continue
            held = PinHeld(pin_id=message.pin_id, was_held=self.is_pinned, read_id=message.read_id)
            self._owner.agent.send_notification(name, encode(held))

    async def listen(self) -> None:
        """Hear the owner's answers."""
        async for name, payload in self._reader_side.agent.notifications():
            message = PIN_MESSAGES.decode(payload)
            assert isinstance(message, PinHeld)
            self.reader.answered(name, message)


@asynccontextmanager
async def peer_stage(
    transports: Callable[[], Iterable[Transport]],
    config: TransferConfig,
) -> AsyncIterator[PeerStage]:
    """Link two workers by transports of one kind."""
    owner, reader = _Side("owner", config, transports()), _Side("reader", config, transports())
    async with owner.agent, reader.agent:
        for side in (owner, reader):
            side.regions.register([[side.arena]], side.agent)
        stage = PeerStage(owner, reader)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(stage.answer()), group.create_task(stage.listen())]
            yield stage
            for task in tasks:
                task.cancel()
