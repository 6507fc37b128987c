"""The worker: takes requests from frontends, runs them on one engine, sends each frontend its deltas step by step.

Everything that is the same for all engines is here: registration, which frontend sent which request, KV events, load
reports, deadlines, draining, and the death of the engine.
"""

import asyncio
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

import msgspec

from penstock.core import log
from penstock.core.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineError,
    PenstockError,
    ProtocolError,
    RequestError,
    StaleRoute,
    Unavailable,
    WorkerLost,
)
from penstock.core.ids import RequestId
from penstock.core.types.events import AllBlocksCleared
from penstock.core.types.instances import EngineInfo, Instance, ModelCard, Prices, Role, WorkerChange
from penstock.core.types.kv import KvAction
from penstock.core.types.load import Step
from penstock.core.types.requests import Delta, MediaPrompt, Prefetch, Request
from penstock.runtime.events.publisher import EventPublishers
from penstock.runtime.observations import WorkerRecorder, WorkerWindow
from penstock.seams import (
    Answer,
    BroadcastSink,
    Discovery,
    Engine,
    FrontendSink,
    HealthReporting,
    KvBlocks,
    MediaAnswer,
    NativeKvTransfer,
    RequestPlane,
)
from penstock.transfer import TransferAgent
from penstock.worker.changes import WorkerChanges
from penstock.worker.config import WorkerConfig
from penstock.worker.engine_driver import EngineDriver
from penstock.worker.frontends import Frontend, Frontends, MediaExpansions, Running, check_request
from penstock.worker.kv_actions import act
from penstock.worker.kv_transfer.kv_transfer import KvTransfer
from penstock.worker.registration import WorkerIdentity, WorkerRegistration, fitting_card
from penstock.worker.reports import LoadReports
from penstock.worker.step_log import StepLog

_log = log.get_logger()


class Worker:
    """One engine as a `seams.WorkerService`. One event loop owns it."""

    def __init__(
        self,
        engine: Engine,
        discovery: Discovery,
        plane: RequestPlane,
        *,
        identity: WorkerIdentity,
        card: ModelCard,
        read_file: Callable[[str], bytes | None],
        prices: Prices | None = None,
        adapters: Sequence[str] = (),
        config: WorkerConfig | None = None,
        agent: TransferAgent | None = None,
    ) -> None:
        """Make a worker; `run` starts it.

        Args:
            engine: not started; the worker starts and closes it.
            discovery: where to register; the caller closes it.
            plane: where to listen.
            identity: name, id, role and location.
            card: model card for frontends; its context length is lowered to the engine's.
            read_file: reads a file of the card by its content hash, for example `ModelFiles.read`; called in a thread.
            prices: seconds of the engine's work, for routers; None if unknown.
            adapters: LoRA adapters of the engine.
            config: times and bounds.
            agent: moves KV to and from other workers, not entered; None without KV transfer.

        Raises:
            ConfigError: the role needs KV transfer, but the engine neither exposes its KV blocks nor transfers them itself.
        """
        self.config = config or WorkerConfig()
        self.publishers = EventPublishers(self.config.events)
        self.ready = asyncio.Event()
        """Set once the worker is registered."""
        self.on_health: Callable[[str | None], None] = lambda _problem: None
        """Called with the reason when the engine cannot serve for now, and with None when it can again."""
        self.on_role: Callable[[Role], None] = lambda _role: None
        """Called when the worker takes requests in another role."""
        self.on_closing: Callable[[BaseException | None], None] = lambda _cause: None
        """Called before the engine is closed, with what ended the worker; None: it has drained."""
        self._engine = engine
        self._discovery, self._plane = discovery, plane
        self._identity = identity
        self._card, self._read_file = card, read_file
        self._prices, self._adapters = prices, tuple(adapters)
        self._info: EngineInfo | None = None
        frontends = self._frontends = Frontends()
        self.events, self.repeat_load = self.publishers.of, frontends.repeat_load
        self.count_tenants = frontends.tenants.count
        self._stopping = asyncio.Event()
        self._registration: WorkerRegistration | None = None
        self._group: asyncio.TaskGroup | None = None
        self._changes: WorkerChanges | None = None
        self._driver = EngineDriver(engine, self._fail)
        self._reports = LoadReports(self.config, self._driver.load, self._frontends.push_load)
        self.refused, frontends.on_refused = frontends.count_refused, self._reports.refresh
        if identity.role is not Role.AGGREGATED and not isinstance(engine, KvBlocks | NativeKvTransfer):
            raise ConfigError(
                f"role {identity.role}: the engine of {identity.name} transfers no KV; use the role aggregated,"
                " or another engine"
            )
        if isinstance(engine, HealthReporting):
            engine.report_health(self._note_health)
        self._agent = agent
        self._expansions = MediaExpansions(engine, worker=self._name, engine_name=identity.engine)
        self._step_log: StepLog | None = None
        self.recorder = WorkerRecorder()

    async def run(self) -> None:
        """Start the engine and serve until `stop`; then drain and withdraw from discovery.

        Raises:
            ConfigError: the model or a setting cannot work, or the step log cannot be written.
            Unavailable: the registry cannot be reached.
            EngineError: the engine died; its requests migrated to other workers, and this worker is withdrawn.
        """
        config = self.config
        if config.step_log is not None:
            self._step_log = StepLog.open(config.step_log, self._identity.name, config.step_log_bytes_max)
        try:
            info = self._driver.announce(self._frontends.announce, await self._engine.start())
            if not config.kv_events:
                info = msgspec.structs.replace(info, kv_events=False)
            info = self._info = self._driver.assume(self._identity.role, info)
            self.publishers.begin(info)
            card = fitting_card(self._card, info)
            async with AsyncExitStack() as stack:
                self._driver.context_length = card.context_length
                if self._agent is not None and isinstance(self._engine, KvBlocks):
                    kv_transfer = KvTransfer(
                        self._engine,
                        info,
                        self._identity.worker_id,
                        agent=self._agent,
                        config=self.config.kv_transfer,
                    )
                    self._driver.kv_transfer = await stack.enter_async_context(kv_transfer)
                    if self._identity.role is not Role.AGGREGATED:
                        await kv_transfer.begin()
                server = await self._plane.serve(self)
                stack.push_async_callback(server.close)
                registration = self._registration = WorkerRegistration(
                    self._make_instance(server.address, card, info),
                    self.config,
                    self._frontends,
                    self._driver,
                    self._end_all,
                )
                self._changes = WorkerChanges(self._engine, self._identity.engine, self._driver, registration)
                self._changes.on_role = self.on_role
                stack.push_async_callback(registration.withdraw)
                await registration.register(self._discovery)
                await self._serve(registration)
        finally:
            self._reports.close()
            if self._step_log is not None:
                self._step_log.close()
            self.on_closing(sys.exc_info()[1])
            await self._engine.close()

    def stop(self, drain_timeout_s: float | None = None) -> None:
        """Start to drain, within the config's time or this; `run` returns when that is done. Call it from the event loop; safe twice."""
        if drain_timeout_s is not None and self._registration is not None:
            self._registration.drain_timeout_s = drain_timeout_s
        self._stopping.set()

    @property
    def instance(self) -> Instance | None:
        """The instance as registered; None before that."""
        return None if self._registration is None else self._registration.instance

    # -- WorkerService

    def check_rank(self, rank: int) -> None:
        if not 0 <= rank < len(self.publishers.ranks):
            raise ProtocolError(
                f"rank {rank}: {self._name} has {len(self.publishers.ranks)} data-parallel ranks"
            )

    def connected(self, sink: FrontendSink, rank: int = 0, key: bytes = b"") -> None:
        self._frontends.push_load_to(self._frontends.connect(sink, rank, key), self._driver.load())

    def broadcast_to(self, sink: BroadcastSink) -> None:
        self.publishers.broadcast_to(sink)
        self._frontends.broadcast = sink

    def submit(self, request: Request, sink: FrontendSink) -> None:
        frontend = self._frontends.at(sink)
        frontend.sent += 1
        self._reports.accepted += 1
        if len(self.publishers.ranks) > 1:
            request = msgspec.structs.replace(request, rank=frontend.rank.number)
        try:
            self._check(request, frontend)
            self._driver.submit(request, frontend)
        except PenstockError as error:
            self._driver.forget(request.request_id, frontend)  # its prefetch
            if isinstance(error, StaleRoute):  # the load that the router did not know goes before the error
                self._frontends.push_load_to(frontend, self._driver.load())
            frontend.push_error(request.request_id, error)
            return
        running = self._frontends.take(msgspec.structs.replace(request, media=None), frontend)
        if request.deadline_s is not None:
            loop = asyncio.get_running_loop()
            running.deadline = loop.call_later(
                request.deadline_s, self._expire, request.request_id, request.deadline_s
            )
        self._reports.note()
        if self._frontends.has_peers(frontend):
            self._reports.hurry()

    def prefetch(self, prefetch: Prefetch, sink: FrontendSink) -> None:
        frontend = self._frontends.at(sink)
        frontend.sent += 1
        self._reports.accepted += 1
        if self._registration is not None and self._registration.refusal is None:
            self._driver.prefetch(prefetch, frontend)
        self._reports.note()

    def abort(self, request_id: RequestId, sink: FrontendSink) -> None:
        frontend = self._frontends.connected(sink)
        if frontend is None:
            return  # its requests ended with its connection
        running = self._frontends.requests.get(request_id)
        if running is None:
            self._driver.forget(request_id, frontend)
        elif running.frontend is frontend:
            self._abort(running)
        else:
            _log.warning("foreign_abort_ignored", worker=self._name, request_id=request_id)

    def disconnected(self, sink: FrontendSink) -> None:
        frontend = self._frontends.disconnect(sink)
        if frontend is not None:
            for request_id in tuple(frontend.requests):
                self._abort(self._frontends.requests[request_id])
            self._driver.drop_owner(frontend)

    def read_file(self, sha256: str) -> asyncio.Future[bytes | None]:
        return asyncio.get_running_loop().run_in_executor(None, self._read_file, sha256)

    def change(self, change: WorkerChange | KvAction, answer: Answer) -> None:
        if isinstance(change, KvAction):
            answer(act(self._engine, change, worker=self._name, engine_name=self._identity.engine))
        elif self._changes is None or self._group is None or self._stopping.is_set():
            answer(Unavailable(f"{self._name} is about to start or to stop; choose another worker"))
        else:
            self._changes.begin(change, self._group, answer)

    def expand_media(self, prompt: MediaPrompt, answer: MediaAnswer) -> None:
        self._expansions.begin(prompt, None if self._stopping.is_set() else self._group, answer)

    def observe(self) -> WorkerWindow:
        """Return what the worker has done since the last call."""
        return self.recorder.take(self._driver.load(), oldest_wait_s=self._frontends.oldest_wait_s())

    def check(self) -> None:
        """Raise AssertionError if the state is inconsistent; for tests and simulations."""
        self._frontends.check()
        self.publishers.check()
        self._driver.check()

    # -- starting

    def _make_instance(self, address: str, card: ModelCard, info: EngineInfo) -> Instance:
        identity = self._identity
        return Instance(
            worker_id=identity.worker_id,
            name=identity.name,
            address=address,
            role=identity.role,
            card=card,
            engine=info,
            pid=identity.pid,
            prices=self._prices,
            adapters=self._adapters,
            exchange=self._driver.exchange,
            **identity.place(),
        )

    # -- serving

    async def _serve(self, registration: WorkerRegistration) -> None:
        self.recorder.begin(registration.instance.role)
        self.ready.set()
        async with asyncio.TaskGroup() as self._group:
            steps = self._group.create_task(self._consume_steps(registration), name="engine steps")
            stopping = self._group.create_task(self._stopping.wait())
            await asyncio.wait((steps, stopping), return_when=asyncio.FIRST_COMPLETED)
            if self._changes is not None:
                self._changes.cancel()
            if not steps.done():
                await registration.leave()
            stopping.cancel()
            steps.cancel()
        if isinstance(registration.refusal, WorkerLost):
            raise EngineError(
                f"{self._name}: {registration.refusal.message}"
            ) from registration.refusal.__cause__

    def _note_health(self, problem: str | None) -> None:
        if self._group is not None and self._registration is not None and not self._stopping.is_set():
            self._group.create_task(self._registration.note_problem(problem or ""))
            self.on_health(problem)

    async def _consume_steps(self, registration: WorkerRegistration) -> None:
        """Process the engine's steps until it dies or this is cancelled: within the iterator, since the body never awaits."""
        problem: Exception | None = None
        try:
            async for step in self._engine.steps():
                self._on_step(step)
        except Exception as error:  # noqa: BLE001 - any error of the engine ends the worker
            problem = error
        why = {} if problem is None else log.cause(problem)
        _log.error("engine_died", worker=self._name, requests=len(self._frontends.requests), **why)
        said = problem.message if isinstance(problem, PenstockError) else repr(problem)
        refusal = WorkerLost("the engine ended by itself" if problem is None else f"the engine ended: {said}")
        refusal.__cause__ = problem
        registration.refusal = refusal
        self._end_all(refusal)

    def _on_step(self, step: Step) -> None:
        """Send each frontend its deltas of a step in one frame."""
        if self._step_log is not None:
            self._step_log.note(step)
        # Read before blocks are pinned for export: pinned blocks are no load.
        load = self._driver.load(step.load)
        self.recorder.stepped(load)
        parts: dict[Frontend, list[Delta]] = {}
        for delta in step.deltas:
            running = self._frontends.requests.get(delta.request_id)
            if running is None:
                continue  # aborted meanwhile
            if delta.token_ids and running.prefill is not None:
                self._frontends.prefilled(running)
            if delta.finish_reason is not None or delta.error is not None:
                self._frontends.forget(delta.request_id)
            sent = self._driver.finish_prefill(delta, running.request, running.frontend)
            parts.setdefault(running.frontend, []).append(sent)
        for request_id in step.prefilling:
            running = self._frontends.requests.get(request_id)
            if running is not None:
                self._driver.prefilling(running.request)
        # Deltas go last: a client that sends its next turn at once is routed by the KV events and load of this step.
        assert self._info is not None, "started"
        if self._info.kv_events:
            self.publishers.publish(step.rank, step.events)
        self._reports.note(load)
        if any(isinstance(event, AllBlocksCleared) for event in step.events):
            self._reports.hurry()  # an idle worker reports nothing else
        self._driver.stepped(load)
        for frontend, deltas in parts.items():
            frontend.sink.push(deltas)

    def _end_all(self, error: PenstockError) -> None:
        """End every request with a retryable error, so that it migrates to another worker."""
        for request_id in tuple(self._frontends.requests):
            running = self._frontends.forget(request_id)
            if running is not None:
                running.frontend.push_error(request_id, error)

    @property
    def kv_transfer(self) -> KvTransfer | None:
        """KV transfer, once started; None without KV transfer."""
        return self._driver.kv_transfer

    @property
    def _name(self) -> str:
        return f"worker {self._identity.name}"

    # -- requests

    def _check(self, request: Request, frontend: Frontend) -> None:
        if self._registration is not None and self._registration.refusal is not None:
            raise self._registration.refusal
        running = self._frontends.requests.get(request.request_id)
        if running is not None:
            if running.frontend is frontend:  # their deltas would have the same id: end both
                self._abort(running)
            raise RequestError(
                f"request_id: {request.request_id} is under way already; give each request its own",
                param="request_id",
            )
        assert self._info is not None, "started"
        check_request(request, self._info, self._adapters, self._name)
        unknown = self._frontends.unknown_arrivals(request, frontend)
        if unknown:
            raise StaleRoute(
                f"request {request.request_id}: its router chose {self._name} without knowing of {unknown} requests that"
                " others have sent there since; it chooses again by the load that comes with this"
            )

    def _abort(self, running: Running) -> None:
        self._frontends.forget(running.request.request_id)
        self._driver.abort(running.request.request_id, running.frontend)
        self._reports.note()

    def _expire(self, request_id: RequestId, deadline_s: float) -> None:
        if (running := self._frontends.requests.get(request_id)) is not None:
            self._driver.abort(request_id, running.frontend)
            error = DeadlineExceeded(f"request {request_id}: {deadline_s:g} s have passed; allow more time")
            self._fail(request_id, error)

    def _fail(self, request_id: RequestId, error: PenstockError) -> None:
        """End an accepted request with an error."""
        running = self._frontends.forget(request_id)
        if running is not None:
            running.frontend.push_error(request_id, error)
            self._reports.note()
