"""Reads KV blocks of prefill workers, and confirms with each that the blocks were pinned until the read was done."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from penstock.core.descriptors import Descriptors, MemoryKind, TransferOp
from penstock.core.errors import PenstockError, PinExpired, ProtocolError
from penstock.core.ids import BlockId, PinId, WorkerId
from penstock.core.types.kv import KvAccess
from penstock.core.types.requests import KvHandle
from penstock.core.wire import HashArray, encode
from penstock.transfer import Peer, TransferAgent
from penstock.worker.kv_transfer.pin_messages import PinCheck, PinFollow, PinGrown, PinHeld
from penstock.worker.kv_transfer.reads import KvReads
from penstock.worker.kv_transfer.regions import KvRegions

_ID_BYTES = 4
_LOOK_S = 0.1
"""Interval of checks that a prefill worker which owes an answer is still connected."""
_FOLLOW_LOOK_S = 1.0
"""The same while waiting for a prompt to be computed; longer, since many may wait for long."""


@dataclass(frozen=True, slots=True)
class Origin:
    """A prefill worker with a connected agent, and its KV memory."""

    worker_id: WorkerId
    source: KvAccess
    peer: Peer


@dataclass(slots=True)
class Growth:
    """The known blocks of a prefill worker's growing pin.

    num_blocks_max: full blocks of the prompt
    block_ids:      (n,) uint32, known so far
    tail:           (0 or 1,) uint32, the partial block
    is_whole:       no more blocks follow
    error:          why no more will come
    changed:        set when anything has changed
    """

    num_blocks_max: int
    pin_id: PinId | None = None
    block_ids: HashArray = field(default_factory=lambda: np.zeros(0, dtype="<u4"))
    tail: HashArray = field(default_factory=lambda: np.zeros(0, dtype="<u4"))
    is_whole: bool = False
    error: PenstockError | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, message: PinGrown) -> None:
        """Add the blocks of a message; a malformed message fails the transfer."""
        if self.is_whole:
            return  # the handle arrived first
        if len(message.block_ids) % _ID_BYTES:
            self.fail(
                ProtocolError(
                    f"pin {message.pin_id}: {len(message.block_ids)} bytes of block ids, expected a multiple of {_ID_BYTES}"
                )
            )
            return
        more = np.frombuffer(message.block_ids, "<u4")
        if message.tail_tokens:
            more, self.tail = more[:-1], more[-1:]
        if message.first != len(self.block_ids) or message.first + len(more) > self.num_blocks_max:
            self.fail(
                ProtocolError(
                    f"pin {message.pin_id}: {len(more)} blocks from block {message.first}, after"
                    f" {len(self.block_ids)} of at most {self.num_blocks_max}"
                )
            )
            return
        self.pin_id = message.pin_id
        self.block_ids = np.concatenate((self.block_ids, more))
        self.is_whole = message.is_whole
        self.changed.set()

    def complete(self, handle: KvHandle, block_size: int) -> None:
        """Replace the known blocks by those of the request's handle, which names the whole prompt."""
        self.changed.set()
        if len(handle.block_ids) % _ID_BYTES:
            self.error = ProtocolError(
                f"pin {handle.pin_id}: its handle has {len(handle.block_ids)} bytes of block ids, expected a multiple of"
                f" {_ID_BYTES}"
            )
            return
        block_ids = np.frombuffer(handle.block_ids, "<u4")
        has_tail = handle.num_tokens % block_size > 0
        num_full = min(max(len(block_ids) - has_tail, 0), self.num_blocks_max)
        self.pin_id = handle.pin_id
        self.block_ids, self.tail = block_ids[:num_full], block_ids[num_full : num_full + 1]
        self.is_whole = True

    def fail(self, error: PenstockError) -> None:
        """Note that no more blocks will come; ignored once all are known."""
        if not self.is_whole:
            self.error = error
            self.changed.set()


class Reader:
    """Reads KV for one decode worker. One event loop owns it."""

    def __init__(self, agent: TransferAgent, regions: KvRegions, *, checksum: bool) -> None:
        """Make an idle reader.

        Args:
            agent: moves the bytes.
            regions: this worker's KV memory.
            checksum: whether to verify what was read, where the memory allows it.
        """
        self._checksum = checksum
        self._agent = agent
        self._regions = regions
        self.reads = KvReads()
        """Totals of what was read, including blocks whose pin had expired."""
        self._read_ids = count(1)
        self._answers: dict[tuple[str, int], asyncio.Future[bool]] = {}
        self._followed: dict[tuple[str, int], Growth] = {}

    async def read(
        self, origin: Origin, pin_id: PinId, targets: Sequence[BlockId], sources: HashArray
    ) -> None:
        """Read blocks, and confirm with the prefill worker that they were pinned until the read was done.

        Args:
            origin: the prefill worker.
            pin_id: its pin of the blocks.
            targets: (n,) reserved blocks of this worker.
            sources: (n,) uint32, blocks of the prefill worker.

        Raises:
            ChecksumMismatch: other bytes arrived.
            TransferError: the bytes did not arrive.
            PinExpired: the bytes arrived, but may belong to another prompt.
        """
        read_id = next(self._read_ids)  # several reads of one pin get separate answers
        peer, done = origin.peer, encode(PinCheck(pin_id=pin_id, read_id=read_id))
        key = peer.name, read_id
        answer = self._answers[key] = asyncio.get_running_loop().create_future()
        try:
            ranges = self._regions.ranges(origin.source, sources, targets)
            if ranges is None:
                self._agent.send_notification(peer, done)
            else:
                await self._move(peer, origin.worker_id, ranges, done)
            if not await self._or_lost(peer, answer):
                raise PinExpired(f"pin {pin_id} of {peer.name} had expired before its blocks were read")
        finally:
            del self._answers[key]

    @contextmanager
    def following(self, peer: Peer, transfer_id: bytes, growth: Growth) -> Iterator[None]:
        """Subscribe to a transfer's blocks at a prefill worker, while the context lasts; `growth` collects them.

        Raises:
            PeerLost: there is no link to the prefill worker.
        """
        read_id = next(self._read_ids)
        self._followed[peer.name, read_id] = growth
        try:
            self._agent.send_notification(peer, encode(PinFollow(transfer_id=transfer_id, read_id=read_id)))
            yield
        finally:
            del self._followed[peer.name, read_id]

    async def next_blocks(self, peer: Peer, growth: Growth) -> None:
        """Wait, without a timeout, until `growth` has changed since the last call.

        Raises:
            PinExpired: the blocks are not pinned any more.
            PeerLost: the prefill worker is gone.
            ProtocolError: the prefill worker sent a malformed message.
        """
        while not growth.changed.is_set():
            peer.check_alive()
            # `wait_for` of Python 3.11 loses a cancellation that arrives together with the event
            with suppress(TimeoutError):
                async with asyncio.timeout(_FOLLOW_LOOK_S):
                    await growth.changed.wait()
        growth.changed.clear()
        if growth.error is not None:
            raise growth.error

    def grown(self, peer: str, message: PinGrown) -> None:
        """Process a prefill worker's message; ignored if nothing follows that pin any more."""
        growth = self._followed.get((peer, message.read_id))
        if growth is not None:
            growth.add(message)

    def answered(self, peer: str, answer: PinHeld) -> None:
        """Process a prefill worker's answer; ignored if nothing waits for it any more."""
        key = peer, answer.read_id
        waiting, growth = self._answers.get(key), self._followed.get(key)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer.was_held)
        if growth is not None:
            growth.fail(PinExpired(f"{peer} has given up pinning the prompt before all of it was computed"))

    def check_idle(self) -> None:
        """Raise AssertionError if a read or subscription is left."""
        assert not self._answers, f"{list(self._answers)} are still waited for"
        assert not self._followed, f"{list(self._followed)} are still followed"

    async def _move(
        self,
        peer: Peer,
        prefill_worker: WorkerId,
        ranges: tuple[Descriptors, Descriptors],
        done: bytes,
    ) -> None:
        """Read ranges, notify the prefill worker with `done`, and count bytes and seconds."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        prepared = self._agent.prepare(*ranges, peer)
        there = peer.infos_of(ranges[1])
        kinds = {region.kind for region in prepared.regions} | {info.kind for info in there}
        checksum = self._checksum and MemoryKind.VRAM not in kinds
        moving = prepared.post(TransferOp.READ, notify=done, checksum=checksum)
        await moving.complete()
        moved = moving.telemetry
        self.reads.add(prefill_worker, moved.backend, moved.num_bytes, began_s, loop.time())

    async def _or_lost(self, peer: Peer, answer: "asyncio.Future[bool]") -> bool:
        """Wait for the prefill worker's answer while it is connected."""
        while not answer.done():
            peer.check_alive()
            await asyncio.wait([answer], timeout=_LOOK_S)
        return answer.result()
