"""KV transfers between workers, for all engines: a prefill worker exports blocks, a decode worker reads them.

The decode worker reads one-sided, while its batch runs, and only blocks that its own cache lacks. Then it asks the prefill
worker whether the blocks were pinned all the time. If not, or if anything else fails, the decode worker computes the prompt
itself: slower, never wrong.
"""

import asyncio
from collections.abc import Hashable
from types import TracebackType
from typing import Self

import msgspec

from penstock.core.errors import (
    ConfigError,
    MemoryInUse,
    Overloaded,
    PenstockError,
    ProtocolError,
)
from penstock.core.ids import PinId, RequestId, WorkerId
from penstock.core.log import get_logger
from penstock.core.types.instances import EngineInfo
from penstock.core.types.kv import KvAccess, KvExchange
from penstock.core.types.requests import KvHandle, Prefetch, Request
from penstock.core.wire import encode
from penstock.seams import KvBlocks
from penstock.transfer import Peer, TransferAgent
from penstock.worker.config import KvTransferConfig
from penstock.worker.kv_transfer.exports import KvExports
from penstock.worker.kv_transfer.incoming import BlockReservations, IncomingTransfers
from penstock.worker.kv_transfer.reader import (
    PIN_MESSAGES,
    KvReads,
    KvRegions,
    Origin,
    PinCheck,
    PinFollow,
    PinGrown,
    PinHeld,
    PinMessage,
    PinRead,
    Reader,
)

_log = get_logger()


class KvTransfer:
    """One worker's KV transfers in both directions. Enter it after the engine's start; one event loop owns it.

    The transfer agent starts with `begin`: called at start by prefill and decode workers, else by the first transfer.
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
        """Make an idle object; `begin` starts it.

        Args:
            engine: started.
            info: the engine's info.
            worker_id: this worker.
            agent: not entered; `begin` enters it, and leaving this context closes it.
            config: times and bounds.

        Raises:
            ConfigError: `stream_kv` is true, but the engine cannot export blocks chunk by chunk.
        """
        self.streams_kv = info.kv_by_chunk if config.stream_kv is None else config.stream_kv
        """Whether blocks move while their prompt is being computed."""
        if self.streams_kv and not info.kv_by_chunk:
            raise ConfigError(
                "worker.kv_transfer.stream_kv: this engine gives a prompt's blocks only once all of it is computed; leave it"
                " out, or use an engine that gives them by chunk"
            )
        self.exports = KvExports(engine, info, worker_id, config, notify=self._notify)
        self._engine = engine
        self._config = config
        self._agent = agent
        self._regions = KvRegions(info)
        self._reader = Reader(agent, self._regions, checksum=config.checksum)
        self._metadata = b""
        self._reservations = BlockReservations(engine, info)
        self.incoming = IncomingTransfers(
            engine,
            info,
            config,
            connect=self._connect,
            reader=self._reader,
            reservations=self._reservations,
            release=self._release,
            is_early=self.streams_kv,
        )
        self._preemptions = 0  # as of the last step
        self._tasks = asyncio.TaskGroup()
        self._agent_task: asyncio.Task[None] | None = None
        self._has_begun: asyncio.Future[None] | None = None

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        await self.incoming.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.incoming.__aexit__(None, None, None)
        finally:
            self.exports.close()
            if self._agent_task is not None:
                self._agent_task.cancel()
            await self._tasks.__aexit__(None, None, None)

    async def begin(self) -> None:
        """Start the agent: register the engine's KV memory and listen. Safe twice.

        Raises:
            ConfigError: the agent cannot listen, the memory does not match the engine's layout, or no transport reaches it.
        """
        if self._has_begun is None:
            self._has_begun = asyncio.get_running_loop().create_future()
            self._agent_task = self._tasks.create_task(self._run_agent(self._has_begun))
        await asyncio.shield(self._has_begun)

    def __len__(self) -> int:
        return len(self.incoming)

    @property
    def exchange(self) -> KvExchange:
        """This worker's KV transfer capabilities, to register."""
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
    def reads(self) -> KvReads:
        """Totals of KV reads from prefill workers."""
        return self._reader.reads

    def expect(self, request: Request, owner: Hashable) -> None:
        """Register a prefill-only request that was submitted to the engine."""
        if self._metadata:
            self.exports.expect(request, owner)

    def grow(self, request: Request) -> None:
        """Export the blocks computed so far of a prompt under way, if `streams_kv`."""
        if self.streams_kv:
            self.exports.grow(request)

    def export(self, request: Request, owner: Hashable) -> KvHandle | None:
        """Pin the blocks of a prompt whose last step has just ended; None if none can be pinned."""
        if not self._metadata:
            return None  # the agent has not started: no peer could reach the blocks
        return self.exports.make(request, owner, self._regions, self._metadata)

    def prefetch(self, prefetch: Prefetch, owner: Hashable) -> None:
        """Start to read a prompt's KV as it is computed, for a request that will follow."""
        try:
            self.incoming.expect(prefetch, owner)
        except Overloaded as error:
            _log.debug("kv_not_prefetched", request_id=prefetch.request_id, error=error.message)
        except ProtocolError as error:  # the request itself will follow anyway
            _log.warning("kv_not_prefetched", request_id=prefetch.request_id, error=error.message)

    def forget(self, request_id: RequestId, owner: Hashable) -> None:
        """Release everything held for an owner's request that does not continue; no error if there is nothing."""
        self.exports.forget(request_id, owner)
        self.incoming.drop(request_id, owner)

    def drop_owner(self, owner: Hashable) -> None:
        """Release everything held for an owner that is gone."""
        self.exports.drop_owner(owner)
        self.incoming.drop_owner(owner)

    def stepped(self, preemptions: int = 0) -> None:
        """Note that the engine may have freed blocks; `preemptions` counts since its start.

        After a preemption, blocks that are pinned for unfinished prompts are released.
        """
        if preemptions > self._preemptions:
            self._preemptions = preemptions
            self.exports.yield_blocks()
            self.incoming.yield_blocks()
        self._reservations.blocks_freed()

    def check(self) -> None:
        """Raise AssertionError if the state is inconsistent."""
        self.exports.check()
        self.incoming.check()

    def check_idle(self) -> None:
        """Raise AssertionError if anything of a request is left; for a worker that has been idle for a while."""
        self.exports.check_idle()
        self._reader.check_idle()
        self.incoming.check_idle()
        self._reservations.check_idle()

    async def _connect(self, source: KvAccess) -> Peer:
        """Connect to a prefill worker's agent."""
        await self.begin()
        return await self._agent.connect(source.agent)

    def _release(self, origin: Origin, pin_id: PinId) -> None:
        """Tell a prefill worker to unpin blocks; if that fails, `pin_ttl_s` ends the pin."""
        try:
            self._agent.send_notification(origin.peer, encode(PinRead(pin_id=pin_id)))
        except PenstockError as error:
            _log.debug("pin_not_released", peer=origin.peer.name, error=error.message)

    # -- messages of peers

    async def _run_agent(self, has_begun: "asyncio.Future[None]") -> None:
        """Enter the agent, process notifications until this is cancelled, and close the agent."""
        try:
            async with self._agent:
                self._regions.register(self._engine.kv_memory(), self._agent)
                self._metadata = self._agent.metadata()
                has_begun.set_result(None)
                await self._listen()
        except MemoryInUse as error:  # a reader does not answer; the memory goes when this process ends
            _log.warning("kv_memory_still_in_use", error=error.message)
        except PenstockError as error:
            if has_begun.done():
                raise
            self._has_begun = None  # the next call may try again
            has_begun.set_exception(error)
            has_begun.exception()  # marks it as retrieved: the caller may have gone
        finally:
            has_begun.cancel()

    async def _listen(self) -> None:
        async for name, payload in self._agent.notifications():
            try:
                self._receive(name, PIN_MESSAGES.decode(payload))
            except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
                _log.warning("notification_skipped", peer=name, error=str(error))
            except Exception:  # noqa: BLE001 - a message of one peer must not fail requests of another
                _log.exception("notification_failed", peer=name)

    def _receive(self, name: str, message: PinMessage) -> None:
        match message:
            case PinRead(pin_id=pin_id):
                self.exports.unpin(pin_id)
            case PinCheck(pin_id=pin_id, read_id=read_id):
                is_held = self.exports.holds(pin_id)
                self._notify(name, PinHeld(pin_id=pin_id, was_held=is_held, read_id=read_id))
            case PinFollow(transfer_id=transfer_id, read_id=read_id):
                self.exports.follow(transfer_id, name, read_id)
            case PinGrown():
                self._reader.grown(name, message)
            case PinHeld():
                self._reader.answered(name, message)

    def _notify(self, agent: str, message: PinHeld | PinGrown) -> None:
        try:
            self._agent.send_notification(agent, encode(message))
        except PenstockError as error:
            _log.debug("follower_not_notified", peer=agent, error=error.message)
