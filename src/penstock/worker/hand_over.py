"""Hand-over of prefilled prompts between workers, once for all engines: a prefill worker offers blocks, a decode worker fetches.

The decode worker reads one-sided, only what its own cache lacks, beside its batch. Then it asks the producer whether the
blocks were held all the time; if they were not, or anything else went wrong, it computes the prompt itself: slower, never
wrong.
"""

import asyncio
from collections.abc import Callable, Hashable
from types import TracebackType
from typing import Self

import msgspec
import numpy as np

from penstock.core.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineError,
    MemoryInUse,
    Overloaded,
    PenstockError,
)
from penstock.core.ids import BlockId, RequestId, WorkerId
from penstock.core.kv_exchange import KvExchange
from penstock.core.log import get_logger
from penstock.core.types import EngineInfo, KvHandle, KvRead, Prefetch, Request
from penstock.core.wire import encode, unpack_hashes
from penstock.seams import KvBlocks, KvTails
from penstock.transfer import Peer, TransferAgent
from penstock.worker.config import HandOverConfig
from penstock.worker.kv_regions import KvRegions
from penstock.worker.offers import Offers
from penstock.worker.pin_messages import (
    PIN_MESSAGES,
    PinCheck,
    PinFollow,
    PinGrown,
    PinHeld,
    PinMessage,
    PinRead,
)
from penstock.worker.prefetches import Arriving, Prefetches
from penstock.worker.reader import Reader
from penstock.worker.room import Room

_log = get_logger()

Submit = Callable[[Request], None]


class HandOver:
    """One worker's side of all hand-overs, either way. Enter it once its engine has started; its event loop owns it.

    It costs nothing until it `begin`s: by itself with the first handle, or when it is told to, so as to make offers.
    """

    def __init__(
        self,
        engine: KvBlocks,
        info: EngineInfo,
        worker_id: WorkerId,
        *,
        agent: TransferAgent,
        config: HandOverConfig,
    ) -> None:
        """Move nothing yet.

        Args:
            engine: a started one.
            info: what it said of itself.
            worker_id: this worker's.
            agent: not entered; this enters it when it begins, and closes it.
            config: times and bounds.

        Raises:
            ConfigError: blocks are to move while a prompt is computed, and the engine cannot do that.
        """
        self.streams_kv = info.kv_by_chunk if config.stream_kv is None else config.stream_kv
        """Whether blocks move while their prompt is computed."""
        if self.streams_kv and not info.kv_by_chunk:
            raise ConfigError(
                "worker.hand_over.stream_kv: this engine gives a prompt's blocks only once all of it is computed; leave it"
                " out, or use an engine that gives them by chunk"
            )
        self.offers = Offers(engine, info, worker_id, config, tell=self._tell)
        self.failures: dict[str, int] = {}
        """Why prompts were computed again, by the error's code."""
        self._worker_id = worker_id
        self._engine = engine
        self._tails = engine if isinstance(engine, KvTails) else None
        self._info = info
        self._config = config
        self._agent = agent
        self._regions = KvRegions(info)
        self._reader = Reader(agent, self._regions)
        self._metadata = b""
        self._room = Room(engine, info)
        self.prefetches = Prefetches(
            engine,
            info,
            config,
            meet=self._meet,
            reader=self._reader,
            room=self._room,
        )
        self._fetches: dict[RequestId, asyncio.Task[None]] = {}
        self._fetched_blocks = 0
        self._preemptions = 0  # as of the last step
        self._home = asyncio.TaskGroup()
        self._tasks: asyncio.TaskGroup | None = None
        self._living: asyncio.Task[None] | None = None
        self._has_begun: asyncio.Future[None] | None = None

    async def __aenter__(self) -> Self:
        await self._home.__aenter__()
        self._tasks = await asyncio.TaskGroup().__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._fetches.values():
            task.cancel()
        self.prefetches.close()
        assert self._tasks is not None, "entered"
        tasks, self._tasks = self._tasks, None
        try:
            await tasks.__aexit__(None, None, None)
        finally:
            self.offers.close()
            if self._living is not None:
                self._living.cancel()
            await self._home.__aexit__(None, None, None)

    async def begin(self) -> None:
        """Register the engine's memory and listen, so that offers can be made. Safe twice.

        Raises:
            ConfigError: the agent cannot listen as it should, or the engine's memory is not what its layout says, or no
                transport has any use for it.
        """
        if self._has_begun is None:
            self._has_begun = asyncio.get_running_loop().create_future()
            self._living = self._home.create_task(self._live(self._has_begun))
        await asyncio.shield(self._has_begun)

    def __len__(self) -> int:
        return len(self._fetches) + len(self.prefetches)

    @property
    def exchange(self) -> KvExchange:
        """How others reach this worker's KV, and it theirs."""
        names = self._regions.transports or self._agent.transport_names
        return KvExchange(
            transports=names,
            listens=tuple(address.partition(":")[0] for address in self._agent.config.listen),
            host=self._agent.identity.host,
            streams=self.streams_kv,
            setups_s=tuple(self._agent.setup_s(name) for name in names),
        )

    @property
    def kv_reads(self) -> tuple[KvRead, ...]:
        """What was read of others' KV, of the last few of them."""
        return self._reader.reads.latest

    @property
    def fetched_blocks(self) -> int:
        """Blocks that came from others, before or after their request did."""
        return self._fetched_blocks + self.prefetches.fetched_blocks

    def open(self, request: Request, owner: Hashable) -> KvHandle | None:
        """Offer the blocks of a prompt of which a part was computed, where that is done; a handle comes once."""
        if not (self.streams_kv and self._metadata):
            return None
        self.offers.grow(request.request_id)
        return self.offers.open(request, owner, self._regions, self._metadata)

    def offer(self, request: Request, owner: Hashable) -> KvHandle | None:
        """Hold the blocks of a prompt that was computed this moment; None where nothing can be held."""
        if not self._metadata:
            return None  # it has not begun: nobody could reach them
        return self.offers.make(request, owner, self._regions, self._metadata)

    def prefetch(self, prefetch: Prefetch, owner: Hashable) -> None:
        """Fetch what there will be of a prompt, if there is room for it; `fetch` finds it."""
        assert self._tasks is not None, "entered"
        if not self.streams_kv:
            return
        try:
            self._check_bound(len(self))
            self.prefetches.begin(prefetch, owner, self._tasks)
        except Overloaded as error:
            _log.debug("kv_not_prefetched", request_id=prefetch.request_id, error=error.message)

    def forget(self, request_id: RequestId, owner: Hashable) -> None:
        """Let go of all that is held for an owner's request that does not go on; no error where nothing is."""
        self.offers.forget(request_id, owner)
        self.prefetches.drop(request_id, owner)

    def disown(self, owner: Hashable) -> None:
        """Let go of all that is held for an owner that is gone."""
        self.offers.disown(owner)
        self.prefetches.disown(owner)

    def fetch(self, request: Request, owner: Hashable, submit: Submit) -> None:
        """Bring what a request's handle names into the engine's cache, then submit it; whatever happens, it is submitted.

        `cancel` prevents that.

        Raises:
            Overloaded: too many wait already.
        """
        assert self._tasks is not None, "entered"
        assert request.kv is not None, "what has no handle is submitted at once"
        arriving = self.prefetches.claim(request.request_id, owner, request.kv)
        if arriving is None:
            self._check_bound(len(self._fetches))
        task = self._tasks.create_task(self._fetch(request, request.kv, arriving, submit))
        if arriving is not None:  # also where it is cancelled before it began
            task.add_done_callback(lambda _: arriving.let_go())
        self._fetches[request.request_id] = task

    def cancel(self, request_id: RequestId) -> bool:
        """Give a fetch up; returns whether there was one."""
        task = self._fetches.pop(request_id, None)
        if task is None:
            return False
        task.cancel()
        return True

    def stepped(self, preemptions: int = 0) -> None:
        """Hear that the engine may have given blocks back, and how often it had too few since it started."""
        if preemptions > self._preemptions:
            self._preemptions = preemptions
            self.offers.give_way()
            self.prefetches.give_way()
        self._room.given_back()

    def check(self) -> None:
        """Raise AssertionError where the parts disagree."""
        self.offers.check()
        self.prefetches.check()

    def check_idle(self) -> None:
        """Raise AssertionError where something of a request is left; for one that has had none for a while."""
        assert not self._fetches, f"{list(self._fetches)} are still fetched"
        self.offers.check_idle()
        self._reader.check_idle()
        self.prefetches.check_idle()
        self._room.check_idle()

    # -- fetching

    def _check_bound(self, waiting: int) -> None:
        if waiting >= self._config.fetches_max:
            raise Overloaded(
                f"{waiting} requests wait for their KV already, hand_over.fetches_max; try another worker",
                retry_after_s=1.0,
            )

    async def _fetch(
        self, request: Request, handle: KvHandle, arriving: Arriving | None, submit: Submit
    ) -> None:
        tail: list[BlockId] = []
        try:
            async with asyncio.timeout(handle.ttl_s):
                if arriving is not None:
                    await arriving.arrived.wait()
                tail = await self._bring(request, handle, arriving)
        except TimeoutError:
            self._failed(request, DeadlineExceeded(f"not here within the {handle.ttl_s:g} s of its handle"))
        except PenstockError as error:
            self._failed(request, error)
        except Exception as error:  # noqa: BLE001 - a bug, or a handle that is none, is this request's fate alone
            _log.exception("kv_fetch_failed", request_id=request.request_id)
            self._failed(request, EngineError(f"{type(error).__name__}: {error}; see the log"))
        if self._fetches.get(request.request_id) is not asyncio.current_task():
            self._engine.unpin(tail)
            return  # given up meanwhile; by now its id may be another's
        del self._fetches[request.request_id]
        submit(msgspec.structs.replace(request, kv=None))
        for block_id in tail:
            assert self._tails is not None, "it was made room for"
            self._tails.lend_tail(request.request_id, block_id, handle.num_tokens % self._info.block_size)

    async def _bring(self, request: Request, handle: KvHandle, arriving: Arriving | None) -> list[BlockId]:
        """Fetch the blocks that are lacking, and publish them once it is certain that they are what they should be.

        What has `arriving` is here, and is let go once it is held anew.

        Returns:
            the block with the tokens past the full ones, held; none where no block was fetched: it alone would cost messages.
        """
        offered = np.frombuffer(handle.block_ids, "<u4")
        if handle.producer == self._worker_id:  # it has changed its role since, and has all of it
            self.offers.take_back(handle.pin_id)
            return []
        num_full, tail_tokens = divmod(handle.num_tokens, self._info.block_size)
        hashes = unpack_hashes(request.block_hashes).reshape(-1, 2)[:num_full]
        peer = await self._meet(handle)
        is_told = False
        tail = [] if arriving is None else arriving.take_tail()
        if arriving is not None:
            arriving.let_go()  # with the next turn of the loop
        try:
            held, reserved = taken = await self._room.hold(hashes)
            try:
                if reserved:
                    lacking: list[BlockId] = []
                    if tail_tokens and not tail and self._tails is not None:
                        tail = lacking = list(self._engine.reserve(1) or ())
                    sources = offered[len(held) : num_full + len(lacking)]
                    await self._reader.read(peer, handle, [*reserved, *lacking], sources)
                    is_told = True
                    parent = int(hashes[len(held) - 1, 0]) if held else None
                    self._engine.publish(reserved, hashes[len(held) :], parent)
                    self._fetched_blocks += len(reserved)
            finally:
                self._room.let_go(taken)
            brought, tail = tail, []
            return brought
        finally:
            self._engine.unpin(tail)
            if not is_told:
                self._let_go(peer, handle)

    async def _meet(self, handle: KvHandle) -> Peer:
        """Connect to who made a handle."""
        await self.begin()
        return await self._agent.connect(handle.agent)

    def _let_go(self, peer: Peer, handle: KvHandle) -> None:
        """Tell a producer that its blocks are not wanted (any more); if that fails, time does it."""
        try:
            self._agent.send_notification(peer, encode(PinRead(pin_id=handle.pin_id)))
        except PenstockError as error:
            _log.debug("pin_not_given_back", peer=peer.name, error=error.message)

    def _failed(self, request: Request, error: PenstockError) -> None:
        self.failures[error.code] = self.failures.get(error.code, 0) + 1
        _log.warning(
            "kv_not_fetched", request_id=request.request_id, error=error.message, effect="computed again"
        )

    # -- what peers say

    async def _live(self, has_begun: "asyncio.Future[None]") -> None:
        """Enter the agent, hear what peers say until this is cancelled, and close it."""
        try:
            async with self._agent:
                self._regions.register(self._engine.kv_memory(), self._agent)
                self._metadata = self._agent.metadata()
                has_begun.set_result(None)
                await self._listen()
        except MemoryInUse as error:  # a reader that was stopped: the process ends, and its memory with it
            _log.warning("kv_memory_still_in_use", error=error.message)
        except PenstockError as error:
            if has_begun.done():
                raise
            self._has_begun = None  # the next one may try again
            has_begun.set_exception(error)
            has_begun.exception()  # whoever asked for it may have gone
        finally:
            has_begun.cancel()

    async def _listen(self) -> None:
        async for name, payload in self._agent.notifications():
            try:
                self._hear(name, PIN_MESSAGES.decode(payload))
            except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
                _log.warning("notification_skipped", peer=name, error=str(error))
            except Exception:  # noqa: BLE001 - what one peer says ends no request of another's
                _log.exception("notification_failed", peer=name)

    def _hear(self, name: str, message: PinMessage) -> None:
        match message:
            case PinRead(pin_id=pin_id, read_id=read_id):
                was_held = self.offers.take_back(pin_id)
                self._tell(name, PinHeld(pin_id=pin_id, was_held=was_held, read_id=read_id))
            case PinCheck(pin_id=pin_id, read_id=read_id):
                is_held = self.offers.holds(pin_id)
                self._tell(name, PinHeld(pin_id=pin_id, was_held=is_held, read_id=read_id))
            case PinFollow(pin_id=pin_id, read_id=read_id):
                self.offers.follow(pin_id, name, read_id)
            case PinGrown():
                self._reader.grown(name, message)
            case PinHeld():
                self._reader.answered(name, message)

    def _tell(self, agent: str, message: PinHeld | PinGrown) -> None:
        try:
            self._agent.send_notification(agent, encode(message))
        except PenstockError as error:
            _log.debug("reader_not_told", peer=agent, error=error.message)
