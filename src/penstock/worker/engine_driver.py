"""A worker's requests at its engine: started at once or once their KV has come; ended, or continued by a decode worker."""

from collections.abc import Callable, Hashable, Sequence

import msgspec

from penstock.core.errors import EngineError, PenstockError, RequestError
from penstock.core.ids import RequestId
from penstock.core.log import get_logger
from penstock.core.types.instances import EngineInfo, Role
from penstock.core.types.kv_exchange import KvExchange
from penstock.core.types.load import WorkerLoad
from penstock.core.types.requests import Delta, FinishReason, Prefetch, Request
from penstock.core.wire import num_tokens
from penstock.seams import Announcing, Engine, KvBlocks, RoleAware
from penstock.worker.kv_transfer.kv_transfer import KvTransfer

_log = get_logger()

Fail = Callable[[RequestId, PenstockError], None]


class EngineDriver:
    """Runs a worker's requests on its engine, wherever their prompts were computed. One event loop owns it."""

    def __init__(self, engine: Engine, on_failure: Fail) -> None:
        """Begin without KV transfer.

        Args:
            engine: the worker's.
            on_failure: hears of a request that was taken, and that the engine refused when its KV had come.
        """
        self.kv_transfer: KvTransfer | None = None
        """Moves KV to and from other workers; None where KV is not transferred."""
        self.context_length = 0
        """Of the model as it is served; prompts that reach it are not disaggregated."""
        self._engine = engine
        self._on_failure = on_failure

    async def prepare(self, role: Role) -> None:
        """See to it that this worker can be of a role; it goes on as what it is.

        Raises:
            RequestError: it cannot (409).
            ConfigError: what moves KV cannot be started.
        """
        if role is Role.AGGREGATED:
            return
        if not isinstance(self._engine, KvBlocks):
            raise RequestError(
                f"role {role}: the engine of this worker does not give its KV blocks; choose a worker with another engine",
                http_status=409,
            )
        if self.kv_transfer is None:
            raise RequestError(
                f"role {role}: this worker was started without a way to move KV; choose another worker",
                http_status=409,
            )
        await self.kv_transfer.begin()

    def assume(self, role: Role, info: EngineInfo) -> EngineInfo:
        """Work as a worker of this role from now on; nothing runs. Gives `info` as it is in this role."""
        if self.kv_transfer is not None:
            self.kv_transfer.incoming.give_way()
        if not isinstance(self._engine, RoleAware):
            return info
        other = self._engine.assume(role)
        return msgspec.structs.replace(
            info, max_batch_tokens=other.max_batch_tokens, prompts_at_once=other.prompts_at_once
        )

    @property
    def exchange(self) -> KvExchange | None:
        """How others reach this worker's KV, and it theirs; None where KV is not transferred."""
        return None if self.kv_transfer is None else self.kv_transfer.exchange

    def announce(self, listener: Callable[[Sequence[RequestId]], None], info: EngineInfo) -> EngineInfo:
        """Have a listener hear whom a step is the first to compute, where the engine says so. Gives `info` with whether it does."""
        if not isinstance(self._engine, Announcing):
            return info
        self._engine.announce(listener)
        return msgspec.structs.replace(info, announces=True)

    def submit(self, request: Request, owner: Hashable) -> None:
        """Have a request of an owner's computed: at once, or once the KV that it brings a handle of is here.

        Raises:
            PenstockError: the engine does not take it.
            Overloaded: too many wait for their KV.
        """
        if request.kv is not None and self.kv_transfer is not None:
            self.kv_transfer.incoming.fetch(request, owner, self._start_fetched)
            return
        self.forget(request.request_id, owner)  # it brings no handle: what was begun for one is of no use
        self._start(request)
        if request.prefill_only and self.kv_transfer is not None and self._goes_on(request):
            self.kv_transfer.expect(request, owner)

    def prefetch(self, prefetch: Prefetch, owner: Hashable) -> None:
        """Fetch KV for a request that is about to come from this owner, if that can be."""
        if self.kv_transfer is not None:
            self.kv_transfer.prefetch(prefetch, owner)

    def abort(self, request_id: RequestId, owner: Hashable) -> None:
        """Stop whatever goes on for a request of an owner's."""
        if self.kv_transfer is None:
            self._engine.abort(request_id)
            return
        if not self.kv_transfer.incoming.cancel(request_id):
            self._engine.abort(request_id)
            self.kv_transfer.stepped()
        self.kv_transfer.forget(request_id, owner)

    def forget(self, request_id: RequestId, owner: Hashable) -> None:
        """Forget a request that its owner gave up, prefilled or prefetched."""
        if self.kv_transfer is not None:
            self.kv_transfer.forget(request_id, owner)

    def disown(self, owner: Hashable) -> None:
        """Hear that an owner of requests is gone, and goes on with none."""
        if self.kv_transfer is not None:
            self.kv_transfer.disown(owner)

    def prefilling(self, request: Request) -> None:
        """Hear that a part of a request's prompt was computed: its KV may move from now on."""
        if request.prefill_only and self.kv_transfer is not None:
            self.kv_transfer.grow(request)

    def told(self, delta: Delta, request: Request, owner: Hashable) -> Delta:
        """Say what an engine's delta means to the request: the end of a prompt may be a KV transfer."""
        if not request.prefill_only or delta.finish_reason is None:
            return delta
        kv_transfer = self.kv_transfer
        if delta.finish_reason is not FinishReason.LENGTH or not self._goes_on(request):
            if kv_transfer is not None:
                kv_transfer.forget(request.request_id, owner)
            return delta
        handle = None if kv_transfer is None else kv_transfer.export(request, owner)
        return msgspec.structs.replace(delta, finish_reason=FinishReason.PREFILLED, kv=handle)

    async def wait_until_read(self) -> None:
        """Wait until nobody has to read anything here any more; time limits of the exports bound it."""
        if self.kv_transfer is not None:
            await self.kv_transfer.exports.none_left.wait()

    def stepped(self, load: WorkerLoad) -> None:
        """Hear that the engine has done a step, which left this load."""
        if self.kv_transfer is not None:
            self.kv_transfer.stepped(load.preemptions)

    def load(self, load: WorkerLoad | None = None) -> WorkerLoad:
        """Give the engine's load, or the one that a step left, with the requests whose KV is on its way as waiting, and how KV transfers went."""
        load = load or self._engine.load()
        if self.kv_transfer is None:
            return load
        return msgspec.structs.replace(
            load,
            waiting_requests=load.waiting_requests + len(self.kv_transfer),
            kv_reads=self.kv_transfer.kv_reads,
            kv_failures=sum(self.kv_transfer.failures.values()),
            kv_expired=self.kv_transfer.exports.expired,
            kv_refused=self.kv_transfer.exports.refused,
        )

    def check(self) -> None:
        """Raise AssertionError where the parts disagree."""
        if self.kv_transfer is not None:
            self.kv_transfer.check()

    def _goes_on(self, request: Request) -> bool:
        """Say whether there may be more to come after its first token."""
        first = request.num_emitted + 1
        return request.sampling.max_tokens > first and num_tokens(request.token_ids) + 1 < self.context_length

    def _start(self, request: Request) -> None:
        """Give a request to the engine; of a prefill-only one, its prompt and one token."""
        if request.prefill_only:
            first = msgspec.structs.replace(request.sampling, max_tokens=request.num_emitted + 1)
            request = msgspec.structs.replace(request, sampling=first)
        try:
            self._engine.submit(request)
        except PenstockError:
            raise
        except Exception as error:  # an engine's bug must not take the others' requests along
            _log.exception("engine_submit_failed", request_id=request.request_id)
            raise EngineError(
                f"request {request.request_id}: the engine could not take it: {error!r}"
            ) from error

    def _start_fetched(self, request: Request) -> None:
        try:
            self._start(request)
        except PenstockError as error:
            self._on_failure(request.request_id, error)
