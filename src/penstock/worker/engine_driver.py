"""Runs a worker's requests on its engine, aggregated or with KV transfer from or to another worker."""

from collections.abc import Callable, Hashable, Sequence

import msgspec

from penstock.core import log
from penstock.core.errors import ConfigError, EngineError, PenstockError, RequestError
from penstock.core.ids import RequestId
from penstock.core.types.instances import EngineInfo, Role
from penstock.core.types.kv import KvExchange
from penstock.core.types.load import WorkerLoad
from penstock.core.types.requests import Delta, FinishReason, Prefetch, Request
from penstock.core.wire import num_tokens
from penstock.seams import Announcing, Engine, KvBlocks, NativeKvTransfer, RoleAware
from penstock.worker.kv_transfer.kv_transfer import KvTransfer

_log = log.get_logger()

Fail = Callable[[RequestId, PenstockError], None]


class EngineDriver:
    """Submits requests to the engine, at once or when their KV has arrived. One event loop owns it."""

    def __init__(self, engine: Engine, on_failure: Fail) -> None:
        """Make a driver without KV transfer.

        Args:
            engine: the worker's engine.
            on_failure: called for an accepted request that the engine refuses once its KV has arrived.
        """
        self.kv_transfer: KvTransfer | None = None
        """Moves KV to and from other workers; None without KV transfer."""
        self.context_length = 0
        """Context length served; a prompt that fills it is not disaggregated."""
        self._engine = engine
        self._on_failure = on_failure
        self._native_prefills: dict[RequestId, Hashable] = {}
        """Prefills whose KV the engine itself transfers, and their owners, until these abort them."""

    async def prepare(self, role: Role) -> None:
        """Start what a role needs, without changing to it yet.

        Raises:
            RequestError: the worker cannot take this role (409).
            ConfigError: KV transfer cannot be started.
        """
        if role is Role.AGGREGATED:
            return
        if isinstance(self._engine, NativeKvTransfer):
            return
        if not isinstance(self._engine, KvBlocks):
            raise RequestError(
                f"role {role}: the engine of this worker transfers no KV; choose a worker with another engine",
                http_status=409,
            )
        if self.kv_transfer is None:
            raise RequestError(
                f"role {role}: this worker was started without a way to move KV; choose another worker",
                http_status=409,
            )
        await self.kv_transfer.begin()

    def assume(self, role: Role, info: EngineInfo) -> EngineInfo:
        """Change the engine's role while no request runs; return `info` with the batch limits of this role."""
        if self.kv_transfer is not None:
            self.kv_transfer.incoming.yield_blocks()
        if not isinstance(self._engine, RoleAware):
            return info
        other = self._engine.assume(role)
        return msgspec.structs.replace(
            info, max_batch_tokens=other.max_batch_tokens, prompts_at_once=other.prompts_at_once
        )

    @property
    def exchange(self) -> KvExchange | None:
        """KV transfer capabilities to register; None without KV transfer."""
        if isinstance(self._engine, NativeKvTransfer):
            return KvExchange.native(self._engine.kv_transfer_kind())
        return None if self.kv_transfer is None else self.kv_transfer.exchange

    def announce(self, listener: Callable[[Sequence[RequestId]], None], info: EngineInfo) -> EngineInfo:
        """Pass `listener` to an `Announcing` engine; return `info` with `announces` set accordingly.

        Raises:
            ConfigError: `info` is nothing that a worker can announce: its sizes are missing or below 1.
        """
        sizes = ("block_size", "context_length", "max_batch_tokens", "max_running_requests")
        if wrong := [name for name in sizes if getattr(info, name, 0) < 1]:
            raise ConfigError(
                f"engine: start() gave {info!r}; expected an EngineInfo with {', '.join(wrong)} >= 1"
            )
        if not isinstance(self._engine, Announcing):
            return info
        self._engine.announce(listener)
        return msgspec.structs.replace(info, announces=True)

    def submit(self, request: Request, owner: Hashable) -> None:
        """Start a request: at once, or with a KV handle once its KV has been read.

        Args:
            request: as it arrived.
            owner: its frontend.

        Raises:
            PenstockError: the engine refuses it.
            Overloaded: `kv_transfer.fetches_max` requests wait for KV.
        """
        if request.kv is not None and self.kv_transfer is not None:
            self.kv_transfer.incoming.fetch(request, owner, self._start_fetched)
            return
        self.forget(request.request_id, owner)  # without a handle, a prefetch for it is of no use
        self._start(request)
        if request.prefill_only and self.kv_transfer is not None and self._continues(request):
            self.kv_transfer.expect(request, owner)

    def prefetch(self, prefetch: Prefetch, owner: Hashable) -> None:
        """Start to read KV for a request that this owner will send, if KV can be transferred."""
        if self.kv_transfer is not None:
            self.kv_transfer.prefetch(prefetch, owner)

    def abort(self, request_id: RequestId, owner: Hashable) -> None:
        """Stop an owner's request and its KV transfers."""
        if self.kv_transfer is None:
            self._abort_engine(request_id)
            return
        if not self.kv_transfer.incoming.cancel(request_id):
            self._abort_engine(request_id)
            self.kv_transfer.stepped()
        self.kv_transfer.forget(request_id, owner)

    def _abort_engine(self, request_id: RequestId) -> None:
        try:
            self._engine.abort(request_id)
        except Exception as error:  # noqa: BLE001 - a bug of the engine must not end other requests
            _log.error("engine_abort_failed", request_id=request_id, **log.cause(error))

    def forget(self, request_id: RequestId, owner: Hashable) -> None:
        """Release what KV transfers hold for a request that its owner dropped, prefilled here or prefetched."""
        if self._native_prefills.get(request_id) is owner:
            del self._native_prefills[request_id]
            self._abort_engine(request_id)
        if self.kv_transfer is not None:
            self.kv_transfer.forget(request_id, owner)

    def drop_owner(self, owner: Hashable) -> None:
        """Release what KV transfers hold for all requests of an owner that has disconnected."""
        for request_id in [name for name, its in self._native_prefills.items() if its is owner]:
            self.forget(request_id, owner)
        if self.kv_transfer is not None:
            self.kv_transfer.drop_owner(owner)

    def prefilling(self, request: Request) -> None:
        """Note that a chunk of a request's prompt was computed; its blocks may be read from now on."""
        if request.prefill_only and self.kv_transfer is not None:
            self.kv_transfer.grow(request)

    def finish_prefill(self, delta: Delta, request: Request, owner: Hashable) -> Delta:
        """Turn the last delta of a prefill-only request into `PREFILLED` with a `KvHandle`; return other deltas unchanged."""
        if not request.prefill_only or delta.finish_reason is None:
            return delta
        if delta.kv is not None:  # the engine transfers it
            self._native_prefills[request.request_id] = owner
            return msgspec.structs.replace(delta, finish_reason=FinishReason.PREFILLED)
        kv_transfer = self.kv_transfer
        if delta.finish_reason is not FinishReason.LENGTH or not self._continues(request):
            if kv_transfer is not None:
                kv_transfer.forget(request.request_id, owner)
            return delta
        handle = None if kv_transfer is None else kv_transfer.export(request, owner)
        return msgspec.structs.replace(delta, finish_reason=FinishReason.PREFILLED, kv=handle)

    async def wait_until_read(self) -> None:
        """Wait until no exported blocks are pinned any more; `pin_ttl_s` bounds it."""
        if self.kv_transfer is not None:
            await self.kv_transfer.exports.none_left.wait()

    def stepped(self, load: WorkerLoad) -> None:
        """Note that the engine has finished a step with this load."""
        if self.kv_transfer is not None:
            self.kv_transfer.stepped(load.preemptions)

    def load(self, load: WorkerLoad | None = None) -> WorkerLoad:
        """Return the engine's load with KV transfer figures; requests that wait for KV count as waiting.

        Args:
            load: the load after a step; None: ask the engine.
        """
        load = load or self._engine.load()
        if self.kv_transfer is None:
            return load
        return msgspec.structs.replace(
            load,
            waiting_requests=load.waiting_requests + len(self.kv_transfer),
            kv_reads=self.kv_transfer.reads.latest,
            kv_failures=sum(self.kv_transfer.incoming.failures.values()),
            kv_expired=self.kv_transfer.exports.expired,
            kv_refused=self.kv_transfer.exports.refused,
            kv_corrupt=self.kv_transfer.incoming.corrupt,
        )

    def check(self) -> None:
        """Raise AssertionError if the state is inconsistent."""
        if self.kv_transfer is not None:
            self.kv_transfer.check()

    def _continues(self, request: Request) -> bool:
        """Say whether more tokens may follow the first one."""
        first = request.num_emitted + 1
        return request.sampling.max_tokens > first and num_tokens(request.token_ids) + 1 < self.context_length

    def _start(self, request: Request) -> None:
        """Submit a request to the engine; limit a prefill-only one to one token."""
        if request.prefill_only:
            first = msgspec.structs.replace(request.sampling, max_tokens=request.num_emitted + 1)
            request = msgspec.structs.replace(request, sampling=first)
        try:
            if request.trace is not None:
                _log.debug("request_started", request_id=request.request_id, **request.trace.headers())
            self._engine.submit(request)
        except PenstockError:
            raise
        except Exception as error:  # a bug of the engine must not end other requests
            _log.error("engine_submit_failed", request_id=request.request_id, **log.cause(error))
            raise EngineError(
                f"request {request.request_id}: the engine could not take it: {error!r}"
            ) from error

    def _start_fetched(self, request: Request) -> None:
        try:
            self._start(request)
        except PenstockError as error:
            self._on_failure(request.request_id, error)
