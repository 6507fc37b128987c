"""Hand-over of prefilled prompts between workers, once for all engines: a prefill worker offers blocks, a decode worker fetches.

The decode worker reads one-sided, only what its own cache lacks, beside its batch. Then it asks the producer whether the
blocks were held all the time; if they were not, or anything else went wrong, it computes the prompt itself: slower, never
wrong.
"""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

import msgspec
import numpy as np

from penstock.core.errors import (
    DeadlineExceeded,
    EngineError,
    Overloaded,
    PenstockError,
    TransferError,
)
from penstock.core.ids import BlockId, RequestId, WorkerId
from penstock.core.kv_exchange import KvExchange
from penstock.core.log import get_logger
from penstock.core.types import EngineInfo, KvHandle, Request
from penstock.core.wire import HashArray, encode, unpack_hashes
from penstock.seams import KvBlocks
from penstock.transfer import Peer, TransferAgent
from penstock.worker.config import HandOverConfig
from penstock.worker.kv_regions import KvRegions
from penstock.worker.offers import Offers
from penstock.worker.pin_messages import PIN_MESSAGES, PinHeld, PinRead
from penstock.worker.reader import Reader

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
        """
        self.offers = Offers(engine, info, worker_id, config)
        self.fetched_blocks = 0
        self.failures: dict[str, int] = {}
        """Why prompts were computed again, by the error's code."""
        self._engine = engine
        self._info = info
        self._config = config
        self._agent = agent
        self._regions = KvRegions(info)
        self._reader = Reader(agent, self._regions)
        self._metadata = b""
        self._fetches: dict[RequestId, asyncio.Task[None]] = {}
        self._turn = asyncio.Lock()  # whose turn it is to wait for room
        self._room = asyncio.Event()
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
        return len(self._fetches)

    @property
    def exchange(self) -> KvExchange:
        """How others reach this worker's KV, and it theirs."""
        return KvExchange(
            transports=self._regions.transports or self._agent.transport_names,
            listens=tuple(address.partition(":")[0] for address in self._agent.config.listen),
            host=self._agent.identity.host,
        )

    def offer(self, request: Request) -> KvHandle | None:
        """Hold the blocks of a prompt that was computed this moment; None where nothing can be held."""
        if not self._metadata:
            return None  # it has not begun: nobody could reach them
        return self.offers.make(request, self._regions, self._metadata)

    def fetch(self, request: Request, submit: Submit) -> None:
        """Bring what a request's handle names into the engine's cache, then submit it; whatever happens, it is submitted.

        `cancel` prevents that.

        Raises:
            Overloaded: too many wait already.
        """
        assert self._tasks is not None, "entered"
        if len(self._fetches) >= self._config.fetches_max:
            raise Overloaded(
                f"{len(self._fetches)} requests wait for their KV already, hand_over.fetches_max; try another worker",
                retry_after_s=1.0,
            )
        task = self._tasks.create_task(self._fetch(request, submit))
        self._fetches[request.request_id] = task

    def cancel(self, request_id: RequestId) -> bool:
        """Give a fetch up; returns whether there was one."""
        task = self._fetches.pop(request_id, None)
        if task is None:
            return False
        task.cancel()
        return True

    def stepped(self) -> None:
        """Hear that the engine may have given blocks back."""
        self._room.set()

    def check(self) -> None:
        """Raise AssertionError where the parts disagree."""
        self.offers.check()

    def check_idle(self) -> None:
        """Raise AssertionError where something of a request is left; for one that has had none for a while."""
        assert not self._fetches, f"{list(self._fetches)} are still fetched"
        self._reader.check_idle()
        assert not self._turn.locked(), "somebody still waits for room"

    # -- fetching

    async def _fetch(self, request: Request, submit: Submit) -> None:
        handle = request.kv
        assert handle is not None, "what has no handle is submitted at once"
        try:
            async with asyncio.timeout(handle.ttl_s):
                await self._bring(request, handle)
        except TimeoutError:
            self._failed(request, DeadlineExceeded(f"not here within the {handle.ttl_s:g} s of its handle"))
        except PenstockError as error:
            self._failed(request, error)
        except Exception as error:  # noqa: BLE001 - a bug, or a handle that is none, is this request's fate alone
            _log.exception("kv_fetch_failed", request_id=request.request_id)
            self._failed(request, EngineError(f"{type(error).__name__}: {error}; see the log"))
        if self._fetches.get(request.request_id) is not asyncio.current_task():
            return  # given up meanwhile; by now its id may be another's
        del self._fetches[request.request_id]
        submit(msgspec.structs.replace(request, kv=None))

    async def _bring(self, request: Request, handle: KvHandle) -> None:
        """Fetch the blocks that are lacking, and publish them once it is certain that they are what they should be."""
        offered = np.frombuffer(handle.block_ids, "<u4")
        hashes = unpack_hashes(request.block_hashes).reshape(-1, 2)[: len(offered)]
        await self.begin()
        peer = await self._agent.connect(handle.agent)
        is_told = False
        try:
            held, reserved = await self._hold(hashes)
            try:
                if reserved:
                    sources = offered[len(held) : len(held) + len(reserved)]
                    await self._reader.read(peer, handle, reserved, sources)
                    is_told = True
                    parent = int(hashes[len(held) - 1, 0]) if held else None
                    self._engine.publish(reserved, hashes[len(held) :], parent)
                    self.fetched_blocks += len(reserved)
            finally:
                self._engine.unpin(reserved)
                self._engine.unpin(held)
                self._room.set()
        finally:
            if not is_told:
                self._let_go(peer, handle)

    async def _hold(self, hashes: HashArray) -> tuple[list[BlockId], list[BlockId]]:
        """Hold what is here, and room for what is not; waits in turn, holding nothing, while what runs needs the room.

        Who held its prefix meanwhile could keep others, and these it, from any room at all.
        """
        held = list(self._engine.pin(hashes))
        if len(held) == len(hashes):
            return held, []
        self._engine.unpin(held)
        async with self._turn:
            while (taken := self._try_to_hold(hashes)) is None:
                self._room.clear()
                await self._room.wait()
            return taken

    def _try_to_hold(self, hashes: HashArray) -> tuple[list[BlockId], list[BlockId]] | None:
        held = list(self._engine.pin(hashes))
        lacking = len(hashes) - len(held)
        if lacking >= self._info.total_blocks:
            self._engine.unpin(held)
            raise TransferError(f"{lacking} blocks do not fit into {self._info.total_blocks}")
        reserved = self._engine.reserve(lacking) if lacking else []
        if reserved is None:
            self._engine.unpin(held)
            return None
        return held, list(reserved)

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
                message = PIN_MESSAGES.decode(payload)
            except msgspec.DecodeError as error:
                _log.warning("notification_skipped", peer=name, error=str(error))
                continue
            if isinstance(message, PinRead):
                was_held = self.offers.take_back(message.pin_id)
                try:
                    answer = PinHeld(pin_id=message.pin_id, was_held=was_held, read_id=message.read_id)
                    self._agent.send_notification(name, encode(answer))
                except PenstockError as error:
                    _log.debug("pin_answer_not_sent", peer=name, error=error.message)
            else:
                self._reader.answered(name, message)
