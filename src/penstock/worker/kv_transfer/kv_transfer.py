"""KV transfers between workers, once for all engines: a prefill worker exports blocks, a decode worker reads them.

The decode worker reads one-sided, only what its own cache lacks, beside its batch. Then it asks the prefill worker whether
the blocks were pinned all the time; if they were not, or anything else went wrong, it computes the prompt itself: slower,
never wrong.
"""

import asyncio
from collections.abc import Hashable
from types import TracebackType
from typing import Self

import msgspec

from penstock.core.errors import ConfigError, MemoryInUse, Overloaded, PenstockError, ProtocolError
from penstock.core.ids import RequestId, WorkerId
from penstock.core.log import get_logger
from penstock.core.types.instances import EngineInfo
from penstock.core.types.kv_exchange import KvExchange, KvSource
from penstock.core.types.load import KvRead
from penstock.core.types.requests import KvHandle, Prefetch, Request
from penstock.core.wire import encode
from penstock.seams import KvBlocks
from penstock.transfer import Peer, TransferAgent
from penstock.worker.config import KvTransferConfig
from penstock.worker.kv_transfer.exports import KvExports
from penstock.worker.kv_transfer.incoming import IncomingTransfers
from penstock.worker.kv_transfer.pin_messages import (
    PIN_MESSAGES,
    PinCheck,
    PinFollow,
    PinGrown,
    PinHeld,
    PinMessage,
    PinRead,
)
from penstock.worker.kv_transfer.reader import Origin, Reader
from penstock.worker.kv_transfer.regions import KvRegions
from penstock.worker.kv_transfer.reservations import BlockReservations

_log = get_logger()


class KvTransfer:
    """One worker's side of all KV transfers, either way. Enter it once its engine has started; its event loop owns it.

    It costs nothing until it `begin`s: by itself with the first handle, or when it is told to, so as to make offers.
    """

    def __init__(
        self,
        engine: KvBlocks,
        info: EngineInfo,
        worker_id: WorkerId,
        *,
        agent: TransferAgent,
        config: KvTransferConfig,
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
                "worker.kv_transfer.stream_kv: this engine gives a prompt's blocks only once all of it is computed; leave it"
                " out, or use an engine that gives them by chunk"
            )
        self.exports = KvExports(engine, info, worker_id, config, tell=self._tell)
        self._engine = engine
        self._agent = agent
        self._regions = KvRegions(info)
        self._reader = Reader(agent, self._regions)
        self._metadata = b""
        self._reservations = BlockReservations(engine, info)
        self.incoming = IncomingTransfers(
            engine,
            info,
            config,
            meet=self._meet,
            reader=self._reader,
            reservations=self._reservations,
            release=self._let_go,
            is_early=self.streams_kv,
        )
        self._preemptions = 0  # as of the last step
        self._home = asyncio.TaskGroup()
        self._living: asyncio.Task[None] | None = None
        self._has_begun: asyncio.Future[None] | None = None

    async def __aenter__(self) -> Self:
        await self._home.__aenter__()
        await self.incoming.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.incoming.__aexit__(None, None, None)
        finally:
            self.exports.close()
            if self._living is not None:
                self._living.cancel()
            await self._home.__aexit__(None, None, None)

    async def begin(self) -> None:
        """Register the engine's memory and listen, so that KV can be exported. Safe twice.

        Raises:
            ConfigError: the agent cannot listen as it should, or the engine's memory is not what its layout says, or no
                transport has any use for it.
        """
        if self._has_begun is None:
            self._has_begun = asyncio.get_running_loop().create_future()
            self._living = self._home.create_task(self._live(self._has_begun))
        await asyncio.shield(self._has_begun)

    def __len__(self) -> int:
        return len(self.incoming)

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
            source=self._regions.source(self._metadata) if self._metadata else None,
        )

    @property
    def kv_reads(self) -> tuple[KvRead, ...]:
        """What was read of others' KV, of the last few of them."""
        return self._reader.reads.latest

    @property
    def fetched_blocks(self) -> int:
        """Blocks that came from others, before or after their request did."""
        return self.incoming.fetched_blocks

    @property
    def failures(self) -> dict[str, int]:
        """Why prompts were computed again, by the error's code."""
        return self.incoming.failures

    def expect(self, request: Request, owner: Hashable) -> None:
        """Know a prompt that was submitted to the engine and will be exported to a decode worker."""
        if self._metadata:
            self.exports.expect(request, owner)

    def grow(self, request: Request) -> None:
        """Export what is computed by now of a prompt under way, where that is done."""
        if self.streams_kv:
            self.exports.grow(request)

    def export(self, request: Request, owner: Hashable) -> KvHandle | None:
        """Hold the blocks of a prompt that was computed this moment; None where nothing can be held."""
        if not self._metadata:
            return None  # it has not begun: nobody could reach them
        return self.exports.make(request, owner, self._regions, self._metadata)

    def prefetch(self, prefetch: Prefetch, owner: Hashable) -> None:
        """Read what there will be of a prompt, if there is room for it; its request finds it here."""
        try:
            self.incoming.expect(prefetch, owner)
        except Overloaded as error:
            _log.debug("kv_not_prefetched", request_id=prefetch.request_id, error=error.message)
        except ProtocolError as error:  # its request comes all the same
            _log.warning("kv_not_prefetched", request_id=prefetch.request_id, error=error.message)

    def forget(self, request_id: RequestId, owner: Hashable) -> None:
        """Let go of all that is held for an owner's request that does not go on; no error where nothing is."""
        self.exports.forget(request_id, owner)
        self.incoming.drop(request_id, owner)

    def disown(self, owner: Hashable) -> None:
        """Let go of all that is held for an owner that is gone."""
        self.exports.disown(owner)
        self.incoming.disown(owner)

    def stepped(self, preemptions: int = 0) -> None:
        """Hear that the engine may have given blocks back, and how often it had too few since it started."""
        if preemptions > self._preemptions:
            self._preemptions = preemptions
            self.exports.give_way()
            self.incoming.give_way()
        self._reservations.given_back()

    def check(self) -> None:
        """Raise AssertionError where the parts disagree."""
        self.exports.check()
        self.incoming.check()

    def check_idle(self) -> None:
        """Raise AssertionError where something of a request is left; for one that has had none for a while."""
        self.exports.check_idle()
        self._reader.check_idle()
        self.incoming.check_idle()
        self._reservations.check_idle()

    async def _meet(self, source: KvSource) -> Peer:
        """Connect to a prefill worker's agent."""
        await self.begin()
        return await self._agent.connect(source.agent)

    def _let_go(self, origin: Origin, handle: KvHandle) -> None:
        """Tell a prefill worker that its blocks are not wanted (any more); if that fails, time does it."""
        try:
            self._agent.send_notification(origin.peer, encode(PinRead(pin_id=handle.pin_id)))
        except PenstockError as error:
            _log.debug("pin_not_given_back", peer=origin.peer.name, error=error.message)

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
            case PinRead(pin_id=pin_id):
                self.exports.take_back(pin_id)
            case PinCheck(pin_id=pin_id, read_id=read_id):
                is_held = self.exports.holds(pin_id)
                self._tell(name, PinHeld(pin_id=pin_id, was_held=is_held, read_id=read_id))
            case PinFollow(transfer_id=transfer_id, read_id=read_id):
                self.exports.follow(transfer_id, name, read_id)
            case PinGrown():
                self._reader.grown(name, message)
            case PinHeld():
                self._reader.answered(name, message)

    def _tell(self, agent: str, message: PinHeld | PinGrown) -> None:
        try:
            self._agent.send_notification(agent, encode(message))
        except PenstockError as error:
            _log.debug("reader_not_told", peer=agent, error=error.message)
