"""A decode worker's side of KV transfers: it reads a prompt's blocks piece by piece, then its request joins the batch.

A transfer begins with the router's `Prefetch`, while the prompt waits or is computed elsewhere, or else with the request
itself, whose handle names the blocks. Each piece is read, confirmed by the prefill worker and published before the next
one. What does not come is computed here: slower, never wrong.
"""

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from typing import Self

import msgspec
import numpy as np

from penstock.core.errors import DeadlineExceeded, EngineError, Overloaded, PenstockError, ProtocolError
from penstock.core.ids import BlockId, RequestId, WorkerId
from penstock.core.log import get_logger
from penstock.core.types.instances import EngineInfo
from penstock.core.types.kv_exchange import KvSource
from penstock.core.types.requests import KvHandle, Prefetch, Request
from penstock.core.wire import HashArray, unpack_hashes
from penstock.seams import KvBlocks, KvPartialBlocks
from penstock.transfer import Peer
from penstock.worker.config import KvTransferConfig
from penstock.worker.kv_transfer.reader import Growth, Origin, Reader
from penstock.worker.kv_transfer.reservations import BlockReservations, HeldBlocks

_HASH_BYTES = 16

_log = get_logger()

Submit = Callable[[Request], None]


@dataclass(slots=True, eq=False)
class Incoming:
    """One prompt's KV on its way. Its task holds blocks for it until it is cancelled, or nobody came for them in time.

    `held` are these, None while there is no room; the first `num_read` of the reserved ones are read and published. `tail`
    is a block with the tokens past the full ones, if that was read too. `has_come` is set once the request is here. `is_over` is set once nothing more will be read; `error` says why not all was.
    """

    request_id: RequestId
    owner: Hashable
    transfer_id: bytes
    prefill_worker: WorkerId
    source: KvSource
    hashes: HashArray
    growth: Growth
    has_come: asyncio.Event = field(default_factory=asyncio.Event)
    origin: Origin | None = None
    held: HeldBlocks | None = None
    num_read: int = 0
    tail: list[BlockId] = field(default_factory=list)
    is_over: asyncio.Event = field(default_factory=asyncio.Event)
    error: PenstockError | None = None
    task: asyncio.Task[None] | None = None

    def come(self, handle: KvHandle, block_size: int) -> None:
        """Note that the request is here, and take its handle's word for where the blocks are."""
        self.growth.complete(handle, block_size)
        self.has_come.set()

    def take_tail(self) -> list[BlockId]:
        """Hand `tail` over to the caller, who holds it from now on."""
        tail, self.tail = self.tail, []
        return tail

    def let_go(self) -> None:
        """Stop it, and give up what it holds; what has been published stays in the cache."""
        if self.task is not None:
            self.task.cancel()


class IncomingTransfers:
    """Those of one worker. Its event loop owns them."""

    def __init__(
        self,
        engine: KvBlocks,
        info: EngineInfo,
        config: KvTransferConfig,
        *,
        meet: Callable[[KvSource], Awaitable[Peer]],
        reader: Reader,
        reservations: BlockReservations,
        release: Callable[[Origin, KvHandle], None],
        is_early: bool,
    ) -> None:
        """Read nothing yet.

        Args:
            engine: a started one.
            info: what it said of itself.
            config: times and bounds.
            meet: connects to a prefill worker's agent.
            reader: reads from it.
            reservations: the engine's blocks for incoming KV.
            release: tells a prefill worker that its blocks are not needed any more.
            is_early: whether blocks are read while their prompt is computed.
        """
        self.fetched_blocks = self.early_blocks = 0
        """Blocks that came, and those of them that came while their prompt was still computed."""
        self.failures: dict[str, int] = {}
        """Why prompts were computed again, by the error's code."""
        self.early_failures: dict[str, int] = {}
        """Why transfers ended before their request came, by the error's code."""
        self._engine = engine
        self._partial_blocks = engine if isinstance(engine, KvPartialBlocks) else None
        self._info = info
        self._config = config
        self._meet = meet
        self._reader = reader
        self._reservations = reservations
        self._release = release
        self._is_early = is_early
        self._expected: dict[tuple[RequestId, Hashable], Incoming] = {}  # whose requests have not come
        self._fetches: dict[RequestId, asyncio.Task[None]] = {}  # for requests that have
        self._under_way: set[Incoming] = set()
        self._tasks: asyncio.TaskGroup | None = None

    def __len__(self) -> int:
        return len(self._expected) + len(self._fetches)

    async def __aenter__(self) -> Self:
        self._tasks = await asyncio.TaskGroup().__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Give everything up; no request is submitted any more."""
        assert self._tasks is not None, "entered"
        for task in self._fetches.values():
            task.cancel()
        for one in self._under_way:
            one.let_go()
        tasks, self._tasks = self._tasks, None
        await tasks.__aexit__(None, None, None)

    def expect(self, prefetch: Prefetch, owner: Hashable) -> None:
        """Read a prompt's blocks as soon as there are any; it replaces an older transfer of the same request.

        Args:
            prefetch: what a router says.
            owner: of the request, until `disown`.

        Raises:
            Overloaded: as many are expected as may be.
            ProtocolError: its hashes are none.
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
            hashes,
            Growth(len(hashes)),
        )
        self._expected[one.request_id, owner] = one
        self._begin(one)

    def fetch(self, request: Request, owner: Hashable, submit: Submit) -> None:
        """Bring what a request's handle names into the engine's cache, then submit it; whatever happens, it is submitted.

        `cancel` prevents that.

        Raises:
            Overloaded: too many wait already.
        """
        assert request.kv is not None, "what has no handle is submitted at once"
        assert self._tasks is not None, "entered"
        one = self._claim(request, owner, request.kv)
        if one is None:
            self._check_bound(len(self._fetches))
            one = self._by_handle(request, owner, request.kv)
            self._begin(one)
        one.come(request.kv, self._info.block_size)
        task = self._fetches[request.request_id] = self._tasks.create_task(
            self._fetch(one, request, request.kv, submit)
        )
        task.add_done_callback(lambda _: one.let_go())  # also where it is cancelled before it began

    def cancel(self, request_id: RequestId) -> bool:
        """Give a fetch up; returns whether there was one."""
        task = self._fetches.pop(request_id, None)
        if task is None:
            return False
        task.cancel()
        return True

    def drop(self, request_id: RequestId, owner: Hashable) -> None:
        """Give up what was begun for an owner's request that does not come; no error where there is nothing."""
        one = self._expected.pop((request_id, owner), None)
        if one is not None:
            one.let_go()

    def disown(self, owner: Hashable) -> None:
        """Give up everything of an owner's whose request has not come."""
        for request_id, its_owner in list(self._expected):
            if its_owner is owner:
                self.drop(request_id, owner)

    def give_way(self) -> None:
        """Give up what is held for requests that have not come: what runs needs the memory."""
        for (request_id, owner), one in list(self._expected.items()):
            if one.held is not None:
                self.drop(request_id, owner)

    def check(self) -> None:
        """Raise AssertionError where the parts disagree."""
        assert self._under_way.issuperset(self._expected.values()), "what is expected is under way"

    def check_idle(self) -> None:
        """Raise AssertionError where anything is left."""
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
        """Give the transfer that was begun for a request; None where there is none, or of a pin that has ended."""
        one = self._expected.pop((request.request_id, owner), None)
        if one is None:
            return None
        is_same = (one.transfer_id, one.prefill_worker) == (request.transfer_id, handle.prefill_worker)
        if is_same and one.growth.pin_id in (None, handle.pin_id) and one.growth.error is None:
            return one
        one.let_go()
        return None

    def _by_handle(self, request: Request, owner: Hashable, handle: KvHandle) -> Incoming:
        hashes = unpack_hashes(request.block_hashes).reshape(-1, 2)
        hashes = hashes[: handle.num_tokens // self._info.block_size]
        source = handle.prefill_worker, handle.source
        return Incoming(request.request_id, owner, request.transfer_id, *source, hashes, Growth(len(hashes)))

    async def _fetch(self, one: Incoming, request: Request, handle: KvHandle, submit: Submit) -> None:
        """Wait until its KV is here, or is known not to come, and submit a request."""
        try:
            async with asyncio.timeout(handle.ttl_s):
                await one.is_over.wait()
        except TimeoutError:
            one.error = DeadlineExceeded(f"not here within the {handle.ttl_s:g} s of its handle")
        finally:
            if one.origin is not None:
                self._release(one.origin, handle)
        if one.error is not None:
            self.failures[one.error.code] = self.failures.get(one.error.code, 0) + 1
            _log.warning(
                "kv_not_fetched",
                request_id=request.request_id,
                error=one.error.message,
                effect="computed again",
            )
        if self._fetches.get(request.request_id) is not asyncio.current_task():
            return  # given up meanwhile; by now its id may be another's
        del self._fetches[request.request_id]
        submit(msgspec.structs.replace(request, kv=None))
        for block_id in one.take_tail():
            assert self._partial_blocks is not None, "it was made room for"
            self._partial_blocks.lend_partial_block(
                request.request_id, block_id, handle.num_tokens % self._info.block_size
            )

    # -- transfers

    def _begin(self, one: Incoming) -> None:
        assert self._tasks is not None, "entered"
        self._under_way.add(one)
        one.task = self._tasks.create_task(self._run(one))
        # one that is cancelled before it began does not get as far as tidying up
        one.task.add_done_callback(lambda _: self._end(one))

    async def _run(self, one: Incoming) -> None:
        try:
            await self._bring(one)
        except PenstockError as error:
            self._fail(one, error)
        except Exception as error:  # noqa: BLE001 - a bug, or a handle that is none, is this prompt's fate alone
            _log.exception("kv_fetch_failed", request_id=one.request_id)
            self._fail(one, EngineError(f"{type(error).__name__}: {error}; see the log"))
        else:
            one.is_over.set()
            await asyncio.sleep(self._config.pin_ttl_s)  # what is held is held for the request

    async def _bring(self, one: Incoming) -> None:
        """Read and publish all that comes, as soon as it does."""
        growth, is_named = one.growth, one.has_come.is_set()
        one.origin = Origin(one.prefill_worker, one.source, await self._meet(one.source))
        if is_named:
            await self._read_next(one, one.origin)
        else:
            with self._reader.following(one.origin.peer, one.transfer_id, growth):
                while not growth.is_whole:
                    await self._read_next(one, one.origin)
        if one.held is None:
            await one.has_come.wait()
            one.held = await self._reservations.hold(one.hashes[: len(growth.block_ids)])
            await self._read(one, one.held, one.origin)

    async def _read_next(self, one: Incoming, origin: Origin) -> None:
        """Wait for more blocks, and read these if there is room."""
        await self._reader.next_blocks(origin.peer, one.growth)
        if one.held is None:
            one.held = self._hold_early(one)
        num_known = -1
        while one.held is not None and num_known < len(one.growth.block_ids):
            num_known = len(one.growth.block_ids)
            await self._read(one, one.held, origin)

    def _hold_early(self, one: Incoming) -> HeldBlocks | None:
        """Hold room for all of a prompt, or nothing where somebody waits for room or too much is held for prompts under way."""
        growth = one.growth
        if not growth.is_whole and not (self._is_early and len(growth.block_ids)):
            return None
        hashes = one.hashes[: len(growth.block_ids)] if growth.is_whole else one.hashes
        if not one.has_come.is_set():
            held = sum(len(other.hashes) for other in self._under_way if other.held is not None)
            if held + len(hashes) > int(self._config.pinned_share_max * self._info.total_blocks):
                return None
        return self._reservations.hold_early(hashes)

    async def _read(self, one: Incoming, held: HeldBlocks, origin: Origin) -> None:
        """Read the blocks that there are and were not read before, and publish them."""
        (here, reserved), growth = held, one.growth
        sources = growth.block_ids
        start, end = len(here) + one.num_read, len(sources)
        if start >= end:
            return
        assert growth.pin_id is not None, "it has blocks"
        targets = reserved[one.num_read : end - len(here)]
        wants_tail = len(growth.tail) and self._partial_blocks is not None
        tail = list(self._engine.reserve(1) or ()) if wants_tail else []
        is_early = not growth.is_whole
        sources = np.concatenate((sources[start:], growth.tail[: len(tail)]))
        try:
            await self._reader.read(origin, growth.pin_id, [*targets, *tail], sources)
        except BaseException:
            self._engine.unpin(tail)
            raise
        one.tail = tail
        self._engine.publish(targets, one.hashes[start:end], int(one.hashes[start - 1, 0]) if start else None)
        one.num_read += len(targets)
        self.fetched_blocks += len(targets)
        self.early_blocks += len(targets) if is_early else 0

    def _fail(self, one: Incoming, error: PenstockError) -> None:
        one.error = error
        if not one.has_come.is_set():
            self.early_failures[error.code] = self.early_failures.get(error.code, 0) + 1
            _log.debug("kv_not_prefetched", request_id=one.request_id, error=error.message)

    def _end(self, one: Incoming) -> None:
        """Give back what one held that is over."""
        self._under_way.discard(one)
        self._engine.unpin(one.take_tail())
        key = one.request_id, one.owner
        if self._expected.get(key) is one:
            del self._expected[key]
        if one.held is not None:
            self._reservations.let_go(one.held)
        one.is_over.set()
