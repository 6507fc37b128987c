"""Reads KV blocks of prefill workers, and confirms with each that the blocks were pinned until the read was done."""

import asyncio
import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import ArrayLike

from penstock.core.descriptors import Descriptors, MemoryKind, TransferOp
from penstock.core.errors import (
    ChecksumMismatch,
    ConfigError,
    EngineError,
    PenstockError,
    PinExpired,
    ProtocolError,
    TransferError,
    TransferRefused,
)
from penstock.core.ids import BlockId, PinId, WorkerId
from penstock.core.log import get_logger
from penstock.core.types.instances import EngineInfo
from penstock.core.types.kv import KvAccess, KvLayout
from penstock.core.types.load import KvRead
from penstock.core.types.requests import TRANSFER_ID_BYTES, KvHandle
from penstock.core.wire import HashArray, Wire, encode, unpack_hashes
from penstock.kv.measured import MeasuredSpeed
from penstock.seams import KvBlocks, KvGrouped, KvNames
from penstock.transfer import Access, Peer, TransferAgent
from penstock.transfer.reshard.moves import ReshardPlan, mismatch, plan, region_bytes

TransferId = Annotated[bytes, msgspec.Meta(min_length=TRANSFER_ID_BYTES, max_length=TRANSFER_ID_BYTES)]


class PinFollow(Wire, frozen=True, tag="pin_follow"):
    """To a prefill worker: subscribe to the blocks of this transfer's prompt as they are computed."""

    transfer_id: TransferId
    read_id: int


class PinGrown(Wire, frozen=True, tag="pin_grown"):
    """To a subscriber: more blocks of a pin.

    first:       index in the prompt of the first of `block_ids`
    block_ids:   packed little-endian uint32
    is_whole:    no more blocks follow
    tail_tokens: if not 0, the last of `block_ids` is the partial block after the full ones, with so many tokens
    """

    pin_id: PinId
    read_id: int
    first: int
    block_ids: bytes
    is_whole: bool
    tail_tokens: int = 0


class PinCheck(Wire, frozen=True, tag="pin_check"):
    """To a prefill worker: blocks were read; were they pinned until now? `PinHeld` answers."""

    pin_id: PinId
    read_id: int


class PinHeld(Wire, frozen=True, tag="pin_held"):
    """To a decode worker: whether the blocks were pinned until now.

    Sent without a `PinCheck`, and False, when a transfer that is subscribed to has ended.
    """

    pin_id: PinId
    was_held: bool
    read_id: int


class PinRead(Wire, frozen=True, tag="pin_read"):
    """To a prefill worker: unpin the blocks; they were read, or are not needed. No answer."""

    pin_id: PinId


PinMessage = PinFollow | PinGrown | PinCheck | PinHeld | PinRead
PIN_MESSAGES: msgspec.msgpack.Decoder[PinMessage] = msgspec.msgpack.Decoder(PinMessage)


_WORKERS_MAX = 256
"""Prefill workers with totals; beyond it the totals of the least recently read one are dropped."""
_REPORTED_MAX = 4
"""Most recently read workers in each load report; since totals are reported, nothing that a report omits is lost."""


class KvReads:
    """Totals by prefill worker, least recently read first. One event loop owns it."""

    def __init__(self) -> None:
        self.latest: tuple[KvRead, ...] = ()
        """Totals of the few prefill workers read from most recently."""
        self._by_worker: dict[WorkerId, KvRead] = {}
        self._ended_s: dict[WorkerId, float] = {}

    def add(
        self, prefill_worker: WorkerId, transport: str, num_bytes: int, begun_s: float, ended_s: float
    ) -> None:
        """Count a successful read; the time that several of one worker overlap counts once."""
        before = self._by_worker.pop(prefill_worker, None)
        begun_s = max(begun_s, self._ended_s.pop(prefill_worker, begun_s))
        self._ended_s[prefill_worker] = max(begun_s, ended_s)
        seconds = max(ended_s - begun_s, 0.0)
        if before is not None:
            num_bytes, seconds = before.num_bytes + num_bytes, before.seconds + seconds
        elif len(self._by_worker) >= _WORKERS_MAX:
            oldest = next(iter(self._by_worker))
            del self._by_worker[oldest], self._ended_s[oldest]
        self._by_worker[prefill_worker] = KvRead(
            prefill_worker=prefill_worker, transport=transport, num_bytes=num_bytes, seconds=seconds
        )
        others = [read for read in self.latest if read.prefill_worker != prefill_worker]
        self.latest = (*others[1 - _REPORTED_MAX :], self._by_worker[prefill_worker])


_PLANS_MAX = 64
"""Layouts of prefill workers whose reshard plans are cached."""
_decoder = msgspec.msgpack.Decoder(KvLayout)


class KvRegions:
    """The KV regions of one engine. One event loop owns it.

    Attributes:
        ids: region ids by rank, in the layout's order; empty before `register`.
        transports: transports that reach every region.
    """

    def __init__(self, info: EngineInfo) -> None:
        """Make unregistered regions; `info` is the engine's info."""
        self._info = info
        self._layout = info.kv_layout
        self._plans: dict[bytes, ReshardPlan] = {}
        self._encoded = b"" if info.kv_layout is None else encode(info.kv_layout)
        self.ids: tuple[tuple[int, ...], ...] = ()
        self.transports: tuple[str, ...] = ()

    def register(self, memory: Sequence[Sequence[object]], agent: TransferAgent) -> None:
        """Register an engine's KV memory with an entered agent.

        Raises:
            ConfigError: the memory does not match the engine's layout, or no transport reaches it.
        """
        self._check(memory)
        try:
            registered = [
                [
                    agent.register(region, f"kv-{rank}-{index}", access=Access.READ)
                    for index, region in enumerate(regions)
                ]
                for rank, regions in enumerate(memory)
            ]
        except TransferRefused as error:
            raise ConfigError(f"worker.kv_transfer.transfer: {error.message}") from error
        for rank, regions in enumerate(registered):
            self._check_sizes(rank, [one.region.size_bytes for one in regions])
        infos = [one.transport_info for regions in registered for one in regions]
        self.ids = tuple(tuple(one.region_id for one in regions) for regions in registered)
        names = agent.transport_names
        self.transports = tuple(name for name in names if all(name in info for info in infos))
        if not self.transports:
            raise ConfigError(
                f"worker.kv_transfer.transfer.transports: those that work here ({', '.join(names) or 'none'}) do not reach all of"
                " the engine's KV memory; allow others, `penstock doctor` says which work, or leave it out"
            )

    def source(self, agent: bytes) -> KvAccess:
        """Describe how to read this worker's KV; `agent` is its agent's metadata."""
        return KvAccess(agent=agent, layout=self._encoded, regions=self.ids)

    def ranges(
        self, source: KvAccess, source_blocks: ArrayLike, target_blocks: ArrayLike
    ) -> tuple[Descriptors, Descriptors] | None:
        """List the byte ranges to read so that blocks of a prefill worker become blocks of this worker.

        Args:
            source: the prefill worker's KV memory.
            source_blocks: (n,) block ids of the prefill worker.
            target_blocks: (n,) block ids of this worker; source block i is read into target block i.

        Returns:
            ranges here and ranges at the prefill worker, one for one; None if neither engine has KV memory (mocks).

        Raises:
            TransferRefused: the two layouts cannot be converted; the text says why.
            TransferError: `source` is malformed.
        """
        if self._layout is None and not source.layout:
            return None
        moves = self._plan_for(source.layout).moves
        if max(move.source.rank for move in moves) >= len(source.regions):
            raise TransferError(
                f"the prefill worker names regions of {len(source.regions)} ranks, its layout has more"
            )
        pairs = [
            move.descriptors(
                source_blocks,
                target_blocks,
                source_regions=source.regions[move.source.rank],
                target_regions=self.ids[move.target.rank],
            )
            for move in moves
        ]
        if len(pairs) == 1:
            there, here = pairs[0]
            return here, there
        theirs, ours = zip(*pairs, strict=True)
        return Descriptors.joined(ours), Descriptors.joined(theirs)

    def _plan_for(self, encoded: bytes) -> ReshardPlan:
        found = self._plans.get(encoded)
        if found is not None:
            return found
        if self._layout is None or not encoded:
            raise TransferRefused("one of the two engines keeps no memory for KV, the other one does")
        found = plan(_decoded(encoded), self._layout)
        if len(self._plans) >= _PLANS_MAX:
            del self._plans[next(iter(self._plans))]
        self._plans[encoded] = found
        return found

    def _check(self, memory: Sequence[Sequence[object]]) -> None:
        layout, ranks, problem = self._layout, 0, None
        if layout is not None:
            ranks, problem = len(layout.ranks), mismatch(layout, layout)
            if problem is None and layout.block_size != self._info.block_size:
                problem = f"blocks of {layout.block_size} tokens, the engine says {self._info.block_size}"
        if problem is None and len(memory) != ranks:
            problem = f"{ranks} ranks, the engine gives memory of {len(memory)}"
        if problem is not None:
            raise ConfigError(f"kv_layout: {problem}")

    def _check_sizes(self, rank: int, sizes: Sequence[int]) -> None:
        assert self._layout is not None, "there are regions"
        expected = region_bytes(self._layout, rank)
        if len(sizes) != len(expected) or any(
            has < needs for has, needs in zip(sizes, expected, strict=True)
        ):
            raise ConfigError(
                f"kv_layout: rank {rank} has regions of {list(sizes)[:8]} bytes, its layout needs {list(expected)[:8]}"
            )


def _decoded(layout: bytes) -> KvLayout:
    try:
        return _decoder.decode(layout)
    except msgspec.DecodeError as error:
        raise TransferError(f"the prefill worker's layout cannot be read: {error}") from error


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


_SPEEDS_MAX = 256
"""Workers whose speed is remembered; beyond it the one that was read from longest ago is forgotten."""

_log = get_logger()
_HASH_BYTES = 16
_CHUNK_BYTES = 16 << 20
"""Least of one read: 13 ms over a network of 10 Gbit/s. Each is confirmed by the prefill worker."""
_CHUNKS_MAX = 16
"""Reads of one prompt: each costs both workers messages, however fast the network is."""


@dataclass(slots=True, eq=False)
class _Load:
    """A load under way."""

    task: "asyncio.Task[None]"

    def cancel(self, *, is_late: bool = False) -> None:  # noqa: ARG002 - a late transfer fails its own prompt alone
        """Stop the transfer."""
        self.task.cancel()


class PeerSpeeds:
    """Seconds per block read from other workers, as measured. One event loop owns it."""

    def __init__(self) -> None:
        """Know nothing."""
        self._by_worker: dict[WorkerId, MeasuredSpeed] = {}

    def of(self, worker_id: WorkerId) -> MeasuredSpeed:
        """Give a worker's speed, which all sources of its blocks share."""
        speed = self._by_worker.pop(worker_id, None) or MeasuredSpeed(half_life_s=math.inf)
        if len(self._by_worker) >= _SPEEDS_MAX:
            del self._by_worker[next(iter(self._by_worker))]
        self._by_worker[worker_id] = speed
        return speed


class PeerSource:
    """The blocks of one prompt that its prefill worker pins, as the prefill worker names them. One event loop owns it.

    A load reads blocks one-sided, verifies them, and has the prefill worker confirm that they were pinned all the time. It
    brings all of its blocks or none. After a failed load the source has no blocks any more.

    Attributes:
        hashes: (n, 2) uint64 of the prompt's full blocks.
        tail_hash: (1, 2) uint64, the name of its partial block here; random, since a partial block has no hash.
        growth: the blocks that the prefill worker has named.
        origin: the prefill worker; None before there is a connection.
        error: why a load failed; None if none has.
        num_loaded: full blocks loaded.
        num_corrupt: loads with bytes that did not match their checksum.
    """

    def __init__(
        self, hashes: HashArray, reader: Reader, speed: MeasuredSpeed, *, block_bytes: int = 0
    ) -> None:
        """Make a source without blocks.

        Args:
            hashes: (n, 2) uint64 of the prompt's full blocks.
            reader: reads the blocks.
            speed: seconds per block read from this prefill worker.
            block_bytes: of one block; 0 where engines keep no memory for KV.
        """
        self.chunk_blocks = max(_CHUNK_BYTES // max(block_bytes, 1), -(-len(hashes) // _CHUNKS_MAX), 1)
        self.hashes = hashes
        self.tail_hash = unpack_hashes(secrets.token_bytes(_HASH_BYTES)).reshape(1, 2)
        self.growth = Growth(len(hashes))
        self.origin: Origin | None = None
        self.error: PenstockError | None = None
        self.num_loaded = 0
        self.num_corrupt = 0
        self._reader = reader
        self._speed = speed
        self._waiting_blocks = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_off(self) -> bool:
        """Whether a load has failed."""
        return self.error is not None

    @property
    def names(self) -> HashArray:
        """(m, 2) uint64: the names of the blocks that it has, the partial block last."""
        full = self.hashes[: len(self.growth.block_ids)]
        return np.concatenate((full, self.tail_hash)) if len(self.growth.tail) else full

    def locate(self, block_hashes: HashArray) -> int:
        """Count the leading blocks that the prefill worker has named."""
        if self.error is not None or not len(block_hashes):
            return 0
        names = self.names
        at = np.flatnonzero((names == block_hashes[0]).all(axis=1))
        if not len(at):
            return 0
        names = names[at[0] :][: len(block_hashes)]
        is_other = (names != block_hashes[: len(names)]).any(axis=1)
        return int(is_other.argmax()) if is_other.any() else len(names)

    def load_s(self, num_blocks: int) -> float:
        """Predict the seconds of a read from this worker; 0 before the first was measured."""
        return self._speed.seconds(num_blocks + self._waiting_blocks)

    def load(self, block_hashes: HashArray, targets: Sequence[BlockId], done: Callable[[int], None]) -> _Load:
        """Read blocks that `locate` has counted."""
        names, growth = self.names, self.growth
        first = int(np.flatnonzero((names == block_hashes[0]).all(axis=1))[0])
        blocks = np.concatenate((growth.block_ids, growth.tail))[first : first + len(targets)]
        num_full = min(len(growth.block_ids) - first, len(targets))
        self._waiting_blocks += len(targets)
        task = asyncio.get_running_loop().create_task(self._read(blocks, targets))
        self._tasks.add(task)

        def on_end(task: "asyncio.Task[None]") -> None:
            self._tasks.discard(task)
            self._waiting_blocks -= len(targets)
            is_read = not task.cancelled() and task.exception() is None and self.error is None
            self.num_loaded += num_full if is_read else 0
            done(len(targets) if is_read else 0)

        task.add_done_callback(on_end)
        return _Load(task)

    async def _read(self, blocks: HashArray, targets: Sequence[BlockId]) -> None:
        assert self.origin is not None, "connected"
        assert self.growth.pin_id is not None, "it has blocks"
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        try:
            await self._reader.read(self.origin, self.growth.pin_id, targets, blocks)
        except asyncio.CancelledError:  # it was no quicker than this
            self._speed.measure_overlapping(len(targets), begun_s, loop.time())
            raise
        except PenstockError as error:
            self.num_corrupt += isinstance(error, ChecksumMismatch)
            self.error = error
        except Exception as error:  # noqa: BLE001 - a bug or a malformed handle fails this prompt alone
            _log.exception("kv_read_failed", prefill_worker=self.origin.worker_id)
            self.error = EngineError(f"{type(error).__name__}: {error}; see the log")
        else:
            self._speed.measure_overlapping(len(targets), begun_s, loop.time())


def names_of(engine: KvBlocks, block_hashes: HashArray) -> KvNames:
    """Name the blocks that an engine needs of a prompt with these full blocks, (n, 2) uint64."""
    if isinstance(engine, KvGrouped):
        return engine.kv_names(block_hashes)
    return KvNames(block_hashes, np.zeros(0, np.uint64), len(block_hashes))
