"""A worker's requests at its engine: started at once, or once their KV has come; ended, or handed over to another worker."""

from collections.abc import Callable, Hashable, Sequence

import msgspec

from penstock.core.errors import EngineError, PenstockError, RequestError
from penstock.core.ids import RequestId
from penstock.core.log import get_logger
from penstock.core.types import Delta, EngineInfo, FinishReason, Prefetch, Request, Role, WorkerLoad
from penstock.core.wire import num_tokens
from penstock.seams import Announcing, Engine, KvBlocks, RoleAware
from penstock.worker.hand_over import HandOver

_log = get_logger()

Fail = Callable[[RequestId, PenstockError], None]


class Computing:
    """Stands between a worker and its engine, and hides where a prompt was computed. One event loop owns it."""

    def __init__(self, engine: Engine, on_failure: Fail) -> None:
        """Begin without hand-over.

        Args:
            engine: the worker's.
            on_failure: hears of a request that was taken, and that the engine refused when its KV had come.
        """
        self.hand_over: HandOver | None = None
        """Moves KV to and from other workers; None where prompts are not handed over."""
        self.context_length = 0
        """Of the model as it is served; prompts that reach it are not handed over."""
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
        if self.hand_over is None:
            raise RequestError(
                f"role {role}: this worker was started without a way to move KV; choose another worker",
                http_status=409,
            )
        await self.hand_over.begin()

    def assume(self, role: Role, info: EngineInfo) -> EngineInfo:
        """Work as a worker of this role from now on; nothing runs. Gives `info` as it is in this role."""
        if self.hand_over is not None:
            self.hand_over.prefetches.give_way()
        if not isinstance(self._engine, RoleAware):
            return info
        other = self._engine.assume(role)
        return msgspec.structs.replace(
            info, max_batch_tokens=other.max_batch_tokens, prompts_at_once=other.prompts_at_once
        )

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
        if request.kv is not None and self.hand_over is not None:
            self.hand_over.fetch(request, owner, self._start_fetched)
            return
        self.forget(request.request_id, owner)  # it brings no handle: what was begun for one is of no use
        self._start(request)

    def prefetch(self, prefetch: Prefetch, owner: Hashable) -> None:
        """Fetch KV for a request that is about to come from this owner, if that can be."""
        if self.hand_over is not None:
            self.hand_over.prefetch(prefetch, owner)

    def abort(self, request_id: RequestId, owner: Hashable) -> None:
        """Stop whatever goes on for a request of an owner's."""
        if self.hand_over is None:
            self._engine.abort(request_id)
            return
        if not self.hand_over.cancel(request_id):
            self._engine.abort(request_id)
            self.hand_over.stepped()
        self.hand_over.forget(request_id, owner)

    def forget(self, request_id: RequestId, owner: Hashable) -> None:
        """Hear that its owner does not go on with a request that may have been handed over, or be about to come."""
        if self.hand_over is not None:
            self.hand_over.forget(request_id, owner)

    def disown(self, owner: Hashable) -> None:
        """Hear that an owner of requests is gone, and goes on with none."""
        if self.hand_over is not None:
            self.hand_over.disown(owner)

    def prefilling(self, request: Request, owner: Hashable) -> Delta | None:
        """Say what it means to a request that a part of its prompt was computed: its KV may move from now on."""
        if not request.hand_over or self.hand_over is None or not self._goes_on(request):
            return None
        handle = self.hand_over.open(request, owner)
        return None if handle is None else Delta(request_id=request.request_id, kv=handle)

    def told(self, delta: Delta, request: Request, owner: Hashable) -> Delta:
        """Say what an engine's delta means to the request: the end of a prompt may be a hand-over."""
        if not request.hand_over or delta.finish_reason is None:
            return delta
        if delta.finish_reason is not FinishReason.LENGTH or not self._goes_on(request):
            self.forget(request.request_id, owner)
            return delta
        handle = None if self.hand_over is None else self.hand_over.offer(request, owner)
        return msgspec.structs.replace(delta, finish_reason=FinishReason.PREFILLED, kv=handle)

    async def handed_over(self) -> None:
        """Wait until nobody has to read anything here any more; time limits of the offers bound it."""
        if self.hand_over is not None:
            await self.hand_over.offers.none_left.wait()

    def stepped(self, load: WorkerLoad) -> None:
        """Hear that the engine has done a step, which left this load."""
        if self.hand_over is not None:
            self.hand_over.stepped(load.preemptions)

    def load(self, load: WorkerLoad | None = None) -> WorkerLoad:
        """Give the engine's load, or the one that a step left, with the requests whose KV is on its way as waiting, and how hand-overs went."""
        load = load or self._engine.load()
        if self.hand_over is None:
            return load
        return msgspec.structs.replace(
            load,
            waiting_requests=load.waiting_requests + len(self.hand_over),
            kv_reads=self.hand_over.kv_reads,
            kv_failures=sum(self.hand_over.failures.values()),
            kv_expired=self.hand_over.offers.expired,
            kv_refused=self.hand_over.offers.refused,
        )

    def check(self) -> None:
        """Raise AssertionError where the parts disagree."""
        if self.hand_over is not None:
            self.hand_over.check()

    def _goes_on(self, request: Request) -> bool:
        """Say whether there may be more to come after its first token."""
        first = request.num_emitted + 1
        return request.sampling.max_tokens > first and num_tokens(request.token_ids) + 1 < self.context_length

    def _start(self, request: Request) -> None:
        """Give a request to the engine; of one that is to be handed over, its prompt and a token."""
        if request.hand_over:
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
