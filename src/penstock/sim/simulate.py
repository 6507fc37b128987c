"""Runs a workload on a simulated deployment, and records the latencies of every request."""

import asyncio
import gc
import math
import random
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest
from typing import cast

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import PenstockError
from penstock.core.ids import RequestId
from penstock.core.types.instances import Role
from penstock.core.types.requests import Request, SamplingParams
from penstock.core.wire import PackedHashes, PackedTokens, num_tokens
from penstock.router.dispatch.dispatcher import Dispatcher
from penstock.runtime.observations import RequestRecorder
from penstock.sim.cluster import SimCluster, SimWorker
from penstock.sim.deployment import SALT, SimDeployment
from penstock.sim.loop import run
from penstock.sim.scaling import START_S, Controller, Counters, ScaledCluster, ScalingRecord, planner_of
from penstock.sim.workload import SimPrompt, SimSession, Turn

OnProgress = Callable[[int, float], None]
_SAMPLES_MAX = 600
_COLLECT_AFTER = 250_000
_SAMPLED = (
    "waiting_requests", "running_requests", "active_blocks", "total_blocks",
    "prefix_hit_tokens", "prefilled_tokens", "generated_tokens",
)  # fmt: skip


@dataclass(slots=True)
class Samples:
    """Load reports of all workers every `interval_s`; in a long run every other sample is dropped repeatedly."""

    interval_s: float
    at_s: list[float] = field(default_factory=list)
    workers: dict[str, int] = field(default_factory=dict)
    """Column of each worker, including ended ones."""
    roles: dict[str, Role] = field(default_factory=dict)
    _taken: list[NDArray[np.float64]] = field(default_factory=list)

    def take(self, at_s: float, cluster: SimCluster) -> None:
        if len(self.at_s) >= _SAMPLES_MAX:
            del self.at_s[::2], self._taken[::2]
            self.interval_s *= 2
        loads = {self._column(worker): worker.engine.load() for worker in cluster.workers.values()}
        taken = np.full((len(self.workers), len(_SAMPLED)), np.nan)
        for column, load in loads.items():
            taken[column] = [getattr(load, name) for name in _SAMPLED]
        self.at_s.append(at_s)
        self._taken.append(taken)

    def _column(self, worker: SimWorker) -> int:
        """Give a worker's column; one that changed its role has another one for each."""
        name = worker.name
        if self.roles.setdefault(name, worker.role) is not worker.role:
            name = f"{name} as {worker.role}"
            self.roles[name] = worker.role
        return self.workers.setdefault(name, len(self.workers))

    def columns_of(self, role: Role) -> list[int]:
        """Give the columns of a role's workers."""
        return [column for name, column in self.workers.items() if self.roles[name] is role]

    def of(self, name: str) -> NDArray[np.float64]:
        """Give a sampled field of `WorkerLoad` as (times, workers); NaN while a worker did not run."""
        values = np.full((len(self.at_s), len(self.workers)), np.nan)
        for row, taken in zip(values, self._taken, strict=True):
            row[: len(taken)] = taken[:, _SAMPLED.index(name)]
        return values


@dataclass(slots=True, repr=False)
class Recording:
    """One row per completed request, in the order of their ends; times are virtual seconds."""

    sent_s: "array[float]" = field(default_factory=lambda: array("d"))
    first_token_s: "array[float]" = field(default_factory=lambda: array("d"))
    second_token_s: "array[float]" = field(default_factory=lambda: array("d"))
    """Requests with remote prefill only; NaN for others."""
    last_token_s: "array[float]" = field(default_factory=lambda: array("d"))
    output_tokens: "array[int]" = field(default_factory=lambda: array("q"))
    prompt_tokens: "array[int]" = field(default_factory=lambda: array("q"))
    cached_tokens: "array[int]" = field(default_factory=lambda: array("q"))
    onboarded_tokens: "array[int]" = field(default_factory=lambda: array("q"))
    """Cached tokens per request and lower tier, host first; empty without lower tiers."""
    tenants: list[str] = field(default_factory=list)
    """Tenant of each request; empty for none."""
    failures: dict[str, int] = field(default_factory=dict)
    """Requests that failed, by error code."""
    failed_of: dict[str, int] = field(default_factory=dict)
    """Failed requests by tenant."""
    example: dict[str, str] = field(default_factory=dict)
    """The first error's text, by code."""
    end_s: float = 0.0
    """Virtual time at the end of the last request."""
    samples: Samples | None = None
    counters: dict[Role, Counters] = field(default_factory=dict)
    """Counters of each role's workers; one that changed its role counts in its last one."""
    scaling: ScalingRecord | None = None
    """How the workers changed; None where nothing scales them."""

    @property
    def failed(self) -> int:
        return sum(self.failures.values())

    @property
    def requests(self) -> int:
        return len(self.sent_s) + self.failed


def simulate(
    deployment: SimDeployment,
    sessions: Iterable[SimSession],
    *,
    seed: int,
    on_progress: OnProgress | None = None,
    sample_interval_s: float | None = None,
    controller: Controller | None = None,
    start_s: float = START_S,
) -> Recording:
    """Run sessions on virtual time; returns after the last one.

    Args:
        deployment: the simulated deployment.
        sessions: sorted by time.
        seed: random seed.
        on_progress: called now and then with (ended requests, virtual time).
        sample_interval_s: virtual seconds between samples of worker loads; None for no samples.
        controller: scales the workers meanwhile; None is the planner of the graph, if it has one.
        start_s: virtual seconds that a worker takes to start once the first request was due.

    Raises:
        ConfigError: the graph's planner cannot predict step times.
    """
    controller = controller or planner_of(deployment)
    samples = None if sample_interval_s is None else Samples(sample_interval_s)
    with _rare_collections():
        return run(
            lambda rng: _Simulation(deployment, rng, on_progress, samples).run(sessions, controller, start_s),
            seed,
        )


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Collect garbage rarely, and never the objects that exist already.

    Workers live as long as the run: scanning 1,000 of them takes a fifth of its time.
    """
    before = gc.get_threshold()
    gc.set_threshold(_COLLECT_AFTER, *before[1:])
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)


class _Simulation:
    def __init__(
        self,
        deployment: SimDeployment,
        rng: random.Random,
        on_progress: OnProgress | None,
        samples: Samples | None,
    ) -> None:
        self._deployment = deployment
        self._rng = rng
        self._on_progress = on_progress
        self._streams: dict[RequestId, SimPrompt] = {}
        self._no_text = memoryview(b"")
        self._recording = Recording(samples=samples)
        self._numbers = 0
        self._start_s = 0.0
        self._recorders: list[RequestRecorder] = []

    @cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    async def run(
        self, sessions: Iterable[SimSession], controller: Controller | None, start_s: float
    ) -> Recording:
        spec = self._deployment.cluster_spec(self._streams)
        async with SimCluster(spec, self._rng) as cluster:
            if controller is None:
                await self._start_workers(cluster)
                await self._serve(sessions, cluster)
                self._count(cluster, {})
                return self._recording
            replicas = {group.role: group.spec.replicas for group in self._deployment.role_groups}
            workers_max = self._deployment.graph.router.workers_max
            async with ScaledCluster(cluster, replicas, start_s=start_s, workers_max=workers_max) as scaled:
                self._recording.scaling = scaled.record
                await self._serve(sessions, cluster, scaled, controller)
                scaled.end(self._recording.end_s)
                self._count(cluster, scaled.ended)
        return self._recording

    async def _start_workers(self, cluster: SimCluster) -> None:
        for role_group in self._deployment.role_groups:
            name = "worker" if role_group.role is Role.AGGREGATED else role_group.role.value
            for number in range(role_group.spec.replicas):
                await cluster.start(f"{name}-{number}", role_group.role)

    async def _serve(
        self,
        sessions: Iterable[SimSession],
        cluster: SimCluster,
        scaled: ScaledCluster | None = None,
        controller: Controller | None = None,
    ) -> None:
        """Run all sessions, beside the controller if there is one."""
        for dispatcher in cluster.dispatchers:
            await dispatcher.serving()
        await asyncio.sleep(1.0)  # until every frontend knows every worker
        self._start_s = self._loop.time()
        self._recorders = [RequestRecorder() for _ in cluster.dispatchers]
        async with asyncio.TaskGroup() as around:
            beside = [around.create_task(self._sample(cluster), name="samples")]
            if scaled is not None and controller is not None:
                scaled.begin(self._recorders)
                beside.append(around.create_task(scaled.send_windows(), name="windows"))
                beside.append(around.create_task(_control(controller, scaled), name="controller"))
            await self._run_all(sessions, cluster)
            for task in beside:
                task.cancel()

    def _count(self, cluster: SimCluster, ended: Mapping[Role, Sequence[Counters]]) -> None:
        """Add up the counters of all workers."""
        onboarded: list[int] = []
        for role_group in self._deployment.role_groups:
            role = role_group.role
            workers = [worker for worker in cluster.workers.values() if worker.role is role]
            counters = self._recording.counters[role] = Counters.of(workers, cluster)
            for other in ended.get(role, ()):
                counters.add(other)
            onboarded = [sum(tier) for tier in zip_longest(onboarded, counters.onboarded_tokens, fillvalue=0)]
        self._recording.onboarded_tokens.extend(onboarded)

    async def _run_all(self, sessions: Iterable[SimSession], cluster: SimCluster) -> None:
        loop = self._loop
        async with asyncio.TaskGroup() as group:
            for session in sessions:
                wait_s = self._start_s + session.at_s - loop.time()
                if wait_s > 0:
                    await asyncio.sleep(wait_s)
                group.create_task(self._run_session(session, cluster.dispatchers))

    async def _sample(self, cluster: SimCluster) -> None:
        samples = self._recording.samples
        if samples is None:
            return
        while True:
            await asyncio.sleep(samples.interval_s)
            samples.take(self._loop.time() - self._start_s, cluster)

    async def _run_session(self, session: SimSession, dispatchers: Sequence[Dispatcher]) -> None:
        """Send a session's turns, round-robin over the frontends."""
        for turn in session.turns:
            if turn.think_s:
                await asyncio.sleep(turn.think_s)
            self._numbers += 1
            request_id = RequestId(f"r{self._numbers}")
            self._streams[request_id] = session.prompt
            number = self._numbers % len(dispatchers)
            try:
                request = self._make(request_id, turn, session)
                await self._send(request, dispatchers[number], self._recorders[number])
            except PenstockError as error:
                recording = self._recording
                recording.failures[error.code] = recording.failures.get(error.code, 0) + 1
                recording.failed_of[session.tenant] = recording.failed_of.get(session.tenant, 0) + 1
                recording.example.setdefault(error.code, error.message)
                break
            finally:
                del self._streams[request_id]
                self._note_end()

    async def _send(self, request: Request, dispatcher: Dispatcher, recorder: RequestRecorder) -> None:
        loop = self._loop
        sent_s = loop.time()
        first_s = second_s = last_s = None
        recorder.arrived(num_tokens(request.token_ids))
        try:
            async with dispatcher.open(request) as stream:
                async for delta in stream:
                    if delta.token_ids:
                        last_s = loop.time()
                        if first_s is None:
                            first_s = last_s
                            recorder.first_token(first_s - sent_s, waited_for_decode=stream.waited_for_decode)
                        elif second_s is None:
                            second_s = last_s
        except PenstockError:
            recorder.ended(output_tokens=0, cached_tokens=0, itl_s=None, failed=True)
            raise
        assert first_s is not None, "an answer has at least one token"
        assert last_s is not None, "and a last one"
        gaps = stream.output_tokens - 1
        recorder.ended(
            output_tokens=stream.output_tokens,
            cached_tokens=stream.cached_tokens,
            itl_s=(last_s - first_s) / gaps if gaps > 0 else None,
            failed=False,
        )
        recording = self._recording
        recording.sent_s.append(sent_s - self._start_s)
        recording.first_token_s.append(first_s - self._start_s)
        if second_s is None or not stream.kv_transfers:
            second_s = math.nan
        recording.second_token_s.append(second_s - self._start_s)
        recording.last_token_s.append(last_s - self._start_s)
        recording.output_tokens.append(stream.output_tokens)
        recording.prompt_tokens.append(num_tokens(request.token_ids))
        recording.cached_tokens.append(stream.cached_tokens)
        recording.tenants.append(request.tenant)

    def _make(self, request_id: RequestId, turn: Turn, session: SimSession) -> Request:
        size, adapter = self._deployment.graph.block_size, session.adapter
        hashes = session.prompt.block_hashes(size, 0, turn.input_tokens // size)
        return Request(
            request_id=request_id,
            model=self._deployment.graph.model,
            token_ids=self._tokens(turn.input_tokens),
            sampling=SamplingParams(max_tokens=turn.output_tokens, ignore_eos=True),
            block_hashes=PackedHashes(hashes.tobytes()),
            salt=SALT,
            slo_ttft_s=session.slo_ttft_s,
            slo_itl_s=session.slo_itl_s,
            tenant=session.tenant,
            adapter=None if adapter is None else self._deployment.adapters[adapter],
        )

    def _tokens(self, count: int) -> PackedTokens:
        """Give `count` tokens, of which only the number matters: slices of one buffer, to avoid copies."""
        if 4 * count > len(self._no_text):
            self._no_text = memoryview(bytes(8 * count))
        return cast("PackedTokens", self._no_text[: 4 * count])

    def _note_end(self) -> None:
        self._recording.end_s = self._loop.time() - self._start_s
        if self._on_progress is not None and self._recording.requests % 64 == 0:
            self._on_progress(self._recording.requests, self._recording.end_s)


async def _control(controller: Controller, scaled: ScaledCluster) -> None:
    await controller(scaled)
