"""The decode worker's side of KV transfers: it reads a prompt's blocks piece by piece, then submits its request.

A transfer begins with the router's `Prefetch`, while the prefill worker computes the prompt, or else with the request, whose
handle names the blocks. Each piece is read, confirmed by the prefill worker and published before the next one. Blocks that do
not arrive are computed here: slower, never wrong.
"""

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Self

import msgspec
import numpy as np

from penstock.core.errors import (
    DeadlineExceeded,
    EngineError,
    Overloaded,
    PenstockError,
    ProtocolError,
    TransferError,
)
from penstock.core.ids import BlockId, PinId, RequestId, WorkerId
from penstock.core.log import get_logger
from penstock.core.types.instances import EngineInfo
from penstock.core.types.kv import KvAccess
from penstock.core.types.requests import KvHandle, Prefetch, Request
from penstock.core.wire import HashArray, unpack_hashes
from penstock.runtime import spans
from penstock.seams import KvBlocks, KvNames, KvPartialBlocks, KvRun
from penstock.transfer import Peer
from penstock.transfer.regions.ranges import settled
from penstock.worker.config import KvTransferConfig
from penstock.worker.kv_transfer.reader import Origin, PeerSource, PeerSpeeds, Reader, names_of

HeldBlocks = tuple[list[BlockId], list[BlockId]]
"""(pinned leading blocks that are cached here, blocks reserved for the rest)."""


class BlockReservations:
    """One engine's reservations. One event loop owns it. A request that waits holds no blocks, so two cannot deadlock."""

    def __init__(self, engine: KvBlocks, info: EngineInfo) -> None:
        """Make an empty set; `info` is the engine's info."""
        self._engine = engine
        self._info = info
        self._turn = asyncio.Lock()  # held by the first waiter; others queue for it
        self._freed = asyncio.Event()

    async def hold(self, hashes: HashArray) -> HeldBlocks:
        """Pin a prompt's cached blocks and reserve blocks for the rest; wait, first come first served, until enough are free.

        Raises:
            TransferError: the engine has fewer blocks in all.
        """
        held = list(self._engine.pin(hashes))
        if len(held) == len(hashes):
            return held, []
        self._engine.unpin(held)
        async with self._turn:
            while (taken := self._try_to_hold(hashes)) is None:
                self._freed.clear()
                await self._freed.wait()
            return taken

    def try_hold(self, hashes: HashArray) -> HeldBlocks | None:
        """Do the same without waiting; None if too few blocks are free, or a request waits in `hold`.

        Raises:
            TransferError: the engine has fewer blocks in all.
        """
        return None if self._turn.locked() else self._try_to_hold(hashes)

    def release(self, held: HeldBlocks) -> None:
        """Unpin the blocks; published ones stay in the prefix cache until they are evicted."""
        here, reserved = held
        self._engine.unpin(reserved)
        self._engine.unpin(here)
        self._freed.set()

    def blocks_freed(self) -> None:
        """Note that the engine may have freed blocks."""
        self._freed.set()

    def check_idle(self) -> None:
        """Raise AssertionError if a request waits."""
        assert not self._turn.locked(), "a request still waits for blocks"

    def _try_to_hold(self, hashes: HashArray) -> HeldBlocks | None:
        here = list(self._engine.pin(hashes))
        lacking = len(hashes) - len(here)
        if lacking >= self._info.total_blocks:
            self._engine.unpin(here)
            raise TransferError(f"{lacking} blocks do not fit into {self._info.total_blocks}")
        reserved = self._engine.reserve(lacking) if lacking else []
        if reserved is None:
            self._engine.unpin(here)
            return None
        return here, list(reserved)


_HASH_BYTES = 16

_log = get_logger()

Submit = Callable[[Request], None]


@dataclass(slots=True, eq=False)
class Incoming:
    """The KV transfer of one prompt. `task` keeps its blocks pinned until it is cancelled or `pin_ttl_s` has passed.

    names:    of the blocks that it needs
    peer:     these blocks at the prefill worker
    has_come: set once the request has arrived
    held:     pinned and reserved blocks; None while too few are free
    num_read: leading reserved blocks that are loaded and published
    tail:     the partial block, if it was loaded
    is_over:  set once nothing more will be loaded
    error:    why not everything was loaded
    """

    request_id: RequestId
    owner: Hashable
    transfer_id: bytes
    prefill_worker: WorkerId
    source: KvAccess
    names: KvNames
    peer: PeerSource
    has_come: asyncio.Event = field(default_factory=asyncio.Event)
    held: HeldBlocks | None = None
    num_read: int = 0
    tail: list[BlockId] = field(default_factory=list)
    is_over: asyncio.Event = field(default_factory=asyncio.Event)
    error: PenstockError | None = None
    task: asyncio.Task[None] | None = None
    began_s: float = field(default_factory=lambda: asyncio.get_running_loop().time())

    def arrive(self, handle: KvHandle, block_size: int) -> None:
        """Note that the request has arrived; its handle names all blocks."""
        self.peer.growth.complete(handle, block_size)
        self.has_come.set()

    def take_tail(self) -> list[BlockId]:
        """Pass the partial block and its pin to the caller."""
        tail, self.tail = self.tail, []
        return tail

    def stop(self) -> None:
        """Cancel the transfer and unpin its blocks; published ones stay in the prefix cache."""
        if self.task is not None:
            self.task.cancel()


class IncomingTransfers:
    """The incoming KV transfers of one decode worker. One event loop owns it."""

    def __init__(
        self,
        engine: KvBlocks,
        info: EngineInfo,
        config: KvTransferConfig,
        *,
        connect: Callable[[KvAccess], Awaitable[Peer]],
        reader: Reader,
        reservations: BlockReservations,
        release: Callable[[Origin, PinId], None],
        is_early: bool,
    ) -> None:
        """Make an empty set.

        Args:
            engine: started.
            info: the engine's info.
            config: times and bounds.
            connect: connects to a prefill worker's agent.
            reader: reads the blocks.
            reservations: the engine's blocks for incoming KV.
            release: tells a prefill worker to unpin the blocks of a pin.
            is_early: whether blocks are read while their prompt is being computed.
        """
        self.fetched_blocks = self.early_blocks = 0
        """Blocks read, and how many of them while their prompt was being computed."""
        self.corrupt = 0
        """Loads from prefill workers with bytes that did not match their checksum."""
        self.failures: dict[str, int] = {}
        """Requests whose prompt was computed again, by error code."""
        self.early_failures: dict[str, int] = {}
        """Transfers that failed before their request arrived, by error code."""
        self._engine = engine
        self._partial_blocks = engine if isinstance(engine, KvPartialBlocks) else None
        self._info = info
        self._config = config
        self._connect = connect
        self._reader = reader
        self._reservations = reservations
        self._release = release
        self._is_early = is_early
        self._expected: dict[tuple[RequestId, Hashable], Incoming] = {}  # requests that have not arrived
        self._fetches: dict[RequestId, asyncio.Task[None]] = {}  # requests that have arrived
        self._under_way: set[Incoming] = set()
        self._speeds = PeerSpeeds()
        self._tasks: asyncio.TaskGroup | None = None

    def __len__(self) -> int:
        return len(self._expected) + len(self._fetches)

    async def __aenter__(self) -> Self:
        self._tasks = await asyncio.TaskGroup().__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Cancel all transfers; their requests are not submitted."""
        assert self._tasks is not None, "entered"
        for task in self._fetches.values():
            task.cancel()
        for one in self._under_way:
            one.stop()
        tasks, self._tasks = self._tasks, None
        await tasks.__aexit__(None, None, None)

    def expect(self, prefetch: Prefetch, owner: Hashable) -> None:
        """Start to read a prompt's blocks as they are computed; replaces an older transfer of the same request.

        Args:
            prefetch: the router's message.
            owner: its frontend; `drop_owner` drops its transfers.

        Raises:
            Overloaded: `fetches_max` transfers exist.
            ProtocolError: the block hashes are malformed.
        """
        self.drop(prefetch.request_id, owner)
        if len(prefetch.block_hashes) % _HASH_BYTES:
            raise ProtocolError(
                f"block_hashes: {len(prefetch.block_hashes)} bytes, expected a multiple of {_HASH_BYTES}; the frontend is broken"
            )
        hashes = unpack_hashes(prefetch.block_hashes).reshape(-1, 2)
        if not (len(hashes) and prefetch.source.agent):
            return
        self._check_bound(len(self))
        one = Incoming(
            prefetch.request_id,
            owner,
            prefetch.transfer_id,
            prefetch.prefill_worker,
            prefetch.source,
            names := names_of(self._engine, hashes),
            self._peer(names.hashes, prefetch.prefill_worker),
        )
        self._expected[one.request_id, owner] = one
        self._begin(one)

    def fetch(self, request: Request, owner: Hashable, submit: Submit) -> None:
        """Read the blocks of a request's handle into the prefix cache, then submit it, also if reading failed.

        `cancel` prevents the submit.

        Raises:
            Overloaded: `fetches_max` requests wait for KV.
        """
        assert request.kv is not None, "a request without a handle is submitted at once"
        assert self._tasks is not None, "entered"
        one = self._claim(request, owner, request.kv)
        if one is None:
            self._check_bound(len(self._fetches))
            one = self._by_handle(request, owner, request.kv)
            self._begin(one)
        one.arrive(request.kv, self._info.block_size)
        task = self._fetches[request.request_id] = self._tasks.create_task(
            self._fetch(one, request, request.kv, submit)
        )
        task.add_done_callback(lambda _: one.stop())  # also if it is cancelled before it began

    def cancel(self, request_id: RequestId) -> bool:
        """Cancel a request's fetch; return whether there was one."""
        task = self._fetches.pop(request_id, None)
        if task is None:
            return False
        task.cancel()
        return True

    def drop(self, request_id: RequestId, owner: Hashable) -> None:
        """Stop the transfer of an owner's request that will not arrive; no error if there is none."""
        one = self._expected.pop((request_id, owner), None)
        if one is not None:
            one.stop()

    def drop_owner(self, owner: Hashable) -> None:
        """Stop all transfers of an owner's requests that have not arrived."""
        for request_id, its_owner in list(self._expected):
            if its_owner is owner:
                self.drop(request_id, owner)

    def yield_blocks(self) -> None:
        """Stop transfers that hold blocks for requests that have not arrived, since running requests need the blocks."""
        for (request_id, owner), one in list(self._expected.items()):
            if one.held is not None:
                self.drop(request_id, owner)

    def check(self) -> None:
        """Raise AssertionError if the state is inconsistent."""
        assert self._under_way.issuperset(self._expected.values()), "what is expected is under way"

    def check_idle(self) -> None:
        """Raise AssertionError if a transfer is left."""
        assert not self._fetches, f"{list(self._fetches)} are still fetched"
        assert not self._under_way, f"{[one.request_id for one in self._under_way]} are still held"

    # -- requests

    def _check_bound(self, waiting: int) -> None:
        if waiting >= self._config.fetches_max:
            raise Overloaded(
                f"{waiting} requests wait for their KV already, kv_transfer.fetches_max; try another worker",
                retry_after_s=1.0,
            )

    def _claim(self, request: Request, owner: Hashable, handle: KvHandle) -> Incoming | None:
        """Take the transfer that a `Prefetch` began for a request; None if there is none, or it has failed or differs."""
        one = self._expected.pop((request.request_id, owner), None)
        if one is None:
            return None
        is_same = (one.transfer_id, one.prefill_worker) == (request.transfer_id, handle.prefill_worker)
        growth = one.peer.growth
        if is_same and growth.pin_id in (None, handle.pin_id) and growth.error is None:
            return one
        one.stop()
        return None

    def _by_handle(self, request: Request, owner: Hashable, handle: KvHandle) -> Incoming:
        hashes = unpack_hashes(request.block_hashes).reshape(-1, 2)
        names = names_of(self._engine, hashes[: handle.num_tokens // self._info.block_size])
        peer = self._peer(names.hashes, handle.prefill_worker)
        source = handle.prefill_worker, handle.source
        return Incoming(request.request_id, owner, request.transfer_id, *source, names, peer)

    def _peer(self, hashes: HashArray, prefill_worker: WorkerId) -> PeerSource:
        """Make the source of a prompt's blocks; sources of one prefill worker share what was measured of it."""
        speed = self._speeds.of(prefill_worker)
        return PeerSource(hashes, self._reader, speed, block_bytes=self._info.kv_bytes_per_block)

    async def _fetch(self, one: Incoming, request: Request, handle: KvHandle, submit: Submit) -> None:
        """Wait until a request's transfer is over, and submit the request."""
        try:
            async with asyncio.timeout(handle.ttl_s):
                await one.is_over.wait()
        except TimeoutError:
            one.error = DeadlineExceeded(f"not here within the {handle.ttl_s:g} s of its handle")
        finally:
            if one.peer.origin is not None:
                self._release(one.peer.origin, handle.pin_id)
            spans.record(
                "kv_transfer",
                request.trace,
                one.began_s,
                asyncio.get_running_loop().time(),
                {"penstock.prefill_worker_id": one.prefill_worker, "penstock.kv_tokens": handle.num_tokens},
                error="" if one.error is None else one.error.message,
            )
        if one.error is not None:
            self.failures[one.error.code] = self.failures.get(one.error.code, 0) + 1
            _log.warning(
                "kv_not_fetched",
                request_id=request.request_id,
                error=one.error.message,
                effect="computed again",
            )
        if self._fetches.get(request.request_id) is not asyncio.current_task():
            return  # cancelled meanwhile; another request may have this id by now
        del self._fetches[request.request_id]
        submit(msgspec.structs.replace(request, kv=None))
        for block_id in one.take_tail():
            assert self._partial_blocks is not None, "a block was reserved for it"
            self._partial_blocks.give_partial_block(
                request.request_id, block_id, handle.num_tokens % self._info.block_size
            )

    # -- transfers

    def _begin(self, one: Incoming) -> None:
        assert self._tasks is not None, "entered"
        self._under_way.add(one)
        one.task = self._tasks.create_task(self._run(one))
        # a callback, since a task that is cancelled before it began runs no `finally`
        one.task.add_done_callback(lambda _: self._end(one))

    async def _run(self, one: Incoming) -> None:
        try:
            await self._read_all(one)
        except PenstockError as error:
            self._fail(one, error)
        except Exception as error:  # noqa: BLE001 - a bug or a malformed handle fails this prompt alone
            _log.exception("kv_fetch_failed", request_id=one.request_id)
            self._fail(one, EngineError(f"{type(error).__name__}: {error}; see the log"))
        else:
            one.is_over.set()
            await asyncio.sleep(self._config.pin_ttl_s)  # keep the blocks pinned for the request

    async def _read_all(self, one: Incoming) -> None:
        """Load and publish all blocks, as they become known."""
        peer, is_named = one.peer, one.has_come.is_set()
        if not is_named:
            await self._load_known(one)  # what tiers have of the prompt
        peer.origin = Origin(one.prefill_worker, one.source, await self._connect(one.source))
        if is_named:
            await self._load_next(one, peer.origin)
        else:
            with self._reader.following(peer.origin.peer, one.transfer_id, peer.growth):
                while not peer.growth.is_whole:
                    await self._load_next(one, peer.origin)
        if one.held is None:
            await one.has_come.wait()
            one.held = await self._reservations.hold(peer.hashes[: len(peer.growth.block_ids)])
            await self._load(one, one.held)

    async def _load_next(self, one: Incoming, origin: Origin) -> None:
        """Wait for more blocks to become known, and load them if blocks can be reserved."""
        await self._reader.next_blocks(origin.peer, one.peer.growth)
        await self._load_known(one)

    async def _load_known(self, one: Incoming) -> None:
        if one.held is None:
            one.held = self._try_hold(one)
        num_known = -1
        while one.held is not None and num_known < len(one.peer.growth.block_ids):
            num_known = len(one.peer.growth.block_ids)
            await self._load(one, one.held)

    def _try_hold(self, one: Incoming) -> HeldBlocks | None:
        """Reserve blocks for a whole prompt; None if a request waits for blocks, or early transfers hold `pinned_share_max`."""
        growth, hashes = one.peer.growth, one.peer.hashes
        if growth.is_whole:
            hashes = hashes[: len(growth.block_ids)]
        elif not (self._is_early and self._engine.find_runs(hashes, 0, one.peer)):
            return None
        if not one.has_come.is_set():
            held = sum(len(other.peer.hashes) for other in self._under_way if other.held is not None)
            if held + len(hashes) > int(self._config.pinned_share_max * self._info.total_blocks):
                return None
        return self._reservations.try_hold(hashes)

    async def _load(self, one: Incoming, held: HeldBlocks) -> None:
        """Load the blocks that a tier or the peer has, and that were not loaded before; publish each chunk as it arrives."""
        (here, reserved), peer = held, one.peer
        start, size = len(here) + one.num_read, len(here) + len(reserved)
        if start >= size:
            return
        names = peer.hashes[:size]
        tail: list[BlockId] = []
        if peer.growth.is_whole and len(peer.growth.tail):
            names = np.concatenate((names, peer.tail_hash))
            tail = list(self._engine.reserve(1) or ()) if self._partial_blocks is not None else []
        runs = self._engine.find_runs(names[: size + len(tail)], start, peer)
        num_targets = sum(run.num_blocks for run in runs)
        is_early, arrived = not peer.growth.is_whole, start
        before, corrupt = peer.num_loaded, peer.num_corrupt

        def publish(count: int) -> None:
            first, end = len(here) + one.num_read, min(start + count, size)
            targets = reserved[one.num_read : end - len(here)]
            if targets:
                for begin, stop, parent in one.names.chains(first, end):
                    self._engine.publish(targets[begin - first : stop - first], names[begin:stop], parent)
                one.num_read += len(targets)
                self.early_blocks += len(targets) if is_early else 0

        targets = [*reserved[one.num_read :], *tail][:num_targets]
        try:
            if runs:
                arrived += await self._wait_for(runs, targets, peer, publish)
        except BaseException:
            self._engine.unpin(tail)
            raise
        publish(arrived - start)
        if arrived <= size:
            self._engine.unpin(tail)
        else:
            one.tail, arrived = tail, size
        self.fetched_blocks += peer.num_loaded - before
        self.corrupt += peer.num_corrupt - corrupt
        if peer.error is not None and (arrived < size or not peer.growth.is_whole):
            raise peer.error

    async def _wait_for(
        self,
        runs: Sequence[KvRun],
        targets: list[BlockId],
        peer: PeerSource,
        on_arrived: Callable[[int], None],
    ) -> int:
        """Load runs; returns the leading blocks that arrived. A cancellation waits until nothing is written any more."""
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        load = self._engine.load_runs(runs, targets, peer, done.set_result, on_arrived)
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            load.cancel()
            await settled(done)
            raise

    def _fail(self, one: Incoming, error: PenstockError) -> None:
        one.error = error
        if not one.has_come.is_set():
            self.early_failures[error.code] = self.early_failures.get(error.code, 0) + 1
            _log.debug("kv_not_prefetched", request_id=one.request_id, error=error.message)

    def _end(self, one: Incoming) -> None:
        """Release everything that an ended transfer holds."""
        self._under_way.discard(one)
        self._engine.unpin(one.take_tail())
        key = one.request_id, one.owner
        if self._expected.get(key) is one:
            del self._expected[key]
        if one.held is not None:
            self._reservations.release(one.held)
        one.is_over.set()
