"""Many routers over many simulated workers: what reaches each router, how alike they choose, and a restart of one."""

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from pathlib import Path
from statistics import mean

import numpy as np

from benchmarks.scale.traffic import Meter, MeteredPlane, Recording
from penstock.core.errors import PenstockError
from penstock.core.ids import RequestId, WorkerId
from penstock.core.types.requests import Request, SamplingParams
from penstock.core.wire import HashArray, PackedHashes, PackedTokens
from penstock.graph import Overrides, load
from penstock.router.config import RouterConfig
from penstock.router.dispatch.dispatcher import Dispatcher
from penstock.router.fleet.member import FleetMember
from penstock.runtime.requests.outbox import CODEC, Event
from penstock.sim.cluster import ClusterSpec, SimCluster
from penstock.sim.deployment import SALT, SimDeployment, plan_deployment
from penstock.sim.loop import run
from penstock.sim.simulate import _rare_collections
from penstock.sim.workload import SimPrompt, SimSession, WorkloadConfig, make_sessions

TOGETHER_S = 0.001
"""Decisions within this time do not know of each other: a message each way, and the worker's turn."""


def same_worker_share(sent: Sequence[tuple[float, int, int]]) -> float:
    """Give the share of requests that went to a worker to which another router had sent one within `TOGETHER_S`.

    Args:
        sent: (time, router, worker) of each request, in the order of time.
    """
    last: dict[int, dict[int, float]] = {}  # by worker, when each router last sent there
    together = 0
    for at_s, router, worker in sent:
        times = last.setdefault(worker, {})
        together += any(other != router and at_s - then_s <= TOGETHER_S for other, then_s in times.items())
        times[router] = at_s
    return together / len(sent) if sent else 0.0


_LOOK_S = 0.002
_LOOKS_MAX = 1000
_COMPARED = 3
"""Routers that a new one is compared with."""
_ALIKE_FACTOR, _ALIKE_S = 1.25, 0.0001
"""A new router chooses like the others while its regret is at most theirs times the factor, or so many seconds."""


@dataclass(frozen=True, slots=True)
class Restart:
    """Virtual seconds from a router's start, its own computing not counted.

    ready_s:        until it could choose among all workers.
    whole_s:        until its index held what another router's held.
    alike_s:        until its choices cost no more than others' do; infinite where that took too long.
    regret_s:       what a choice of another router costs beyond one's own, by one's own prices: mean over probes.
    empty_regret_s: the same of the new router as soon as it could choose.
    """

    ready_s: float
    whole_s: float
    alike_s: float
    regret_s: float
    empty_regret_s: float


async def measure_restart(
    others: Sequence[Dispatcher], start: Callable[[], Awaitable[Dispatcher]], probes: Sequence[Request]
) -> Restart:
    """Start a router and follow it until it chooses for `probes` as well as `others` do."""
    loop = asyncio.get_running_loop()
    others = others[:_COMPARED]
    peers_s = mean(regret_s(one, other, probes) for one, other in permutations(others, 2))
    begun_s = loop.time()
    new = await start()
    ready_s = whole_s = empty_s = None
    for _ in range(_LOOKS_MAX):
        await asyncio.sleep(_LOOK_S)
        if ready_s is None and _ready(new) == _ready(others[0]):
            ready_s, empty_s = loop.time() - begun_s, regret_s(others[0], new, probes)
        if ready_s is None or empty_s is None:
            continue
        if whole_s is None and _pairs(new) >= _pairs(others[0]):
            whole_s = loop.time() - begun_s
        if whole_s is not None:
            own_s = mean(regret_s(other, new, probes) for other in others)
            if own_s <= max(_ALIKE_FACTOR * peers_s, _ALIKE_S):
                return Restart(ready_s, whole_s, loop.time() - begun_s, peers_s, empty_s)
    assert ready_s is not None, "workers answer at once"
    assert whole_s is not None, "and send what they hold"
    assert empty_s is not None, "asked for as soon as it was ready"
    return Restart(ready_s, whole_s, math.inf, peers_s, empty_s)


def regret_s(judge: Dispatcher, other: Dispatcher, probes: Sequence[Request]) -> float:
    """Give the mean seconds that the choices of `other` cost beyond those of `judge`, as `judge` prices them."""
    beyond_s = []
    for probe in probes:
        own, theirs = judge._shared.router.score(probe), other._shared.router.score(probe)
        assert own is not None, "it knows workers"
        assert theirs is not None, "it knows workers"
        worker_id = WorkerId(int(theirs.context.worker_ids[theirs.choice.slot]))
        slot = judge._shared.fleet.slot_of(worker_id)
        assert slot is not None, "both know the same workers"
        beyond_s.append(own.choice.costs_more(slot))
    return mean(beyond_s)


def _ready(dispatcher: Dispatcher) -> int:
    return sum(int(pool.ready.sum()) for pool in dispatcher._shared.fleet.pools.values())


def _pairs(dispatcher: Dispatcher) -> int:
    return dispatcher._shared.fleet.tree.stats().pairs


GRAPH = Path("examples/graphs/8b-h100-x8.yaml")
PROMPT_TOKENS, SHARED_TOKENS, OUTPUT_TOKENS, GROUPS = 512, 512, 1536, 256
_SAMPLE_S = 0.05
_PROBES = 50
_PROMPTS_MAX = 2000


@dataclass(frozen=True, slots=True)
class Size:
    """A run: `per_worker_s` requests to each worker a second, for `ramp_s`, and then measured for `window_s`."""

    workers: int
    routers: int
    per_worker_s: float
    ramp_s: float
    window_s: float


@dataclass(slots=True)
class Outcome:
    """What one run gave.

    in_flight:  streams at once, mean over the window.
    unevenness: largest number of streams of one worker over the mean of all, mean over the window.
    same_worker_share: decisions within a millisecond of another router's for the same worker.
    failed: requests until the end of the window.
    resent_share: decisions for a request that a worker had sent back, as others' had come first.
    """

    meters: list[Meter]
    recording: Recording
    in_flight: list[int] = field(default_factory=list)
    unevenness: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    same_worker_share: float = 0.0
    resent_share: float = 0.0
    decisions: int = 0
    failed: int = 0
    restart: Restart | None = None


def plan(size: Size) -> SimDeployment:
    """Plan the deployment of a run."""
    settings = [
        f"roles.aggregated.replicas={size.workers}",
        f"frontend.processes={size.routers}",
        f"router.workers_max={max(1024, size.workers)}",
        "router.indexed_blocks_max=200000000",
    ]
    return plan_deployment(load(str(GRAPH), Overrides(settings)), beside=GRAPH.parent)


def simulate(size: Size, *, seed: int, with_restart: bool = False) -> Outcome:
    """Run the routers over the workers on virtual time."""
    deployment = plan(size)
    with _rare_collections():
        return run(lambda rng: _Scale(size, deployment, rng).run(with_restart=with_restart), seed)


class _MeteredCluster(SimCluster):
    """A cluster whose routers' input is counted."""

    def __init__(self, spec: ClusterSpec, rng: random.Random) -> None:
        super().__init__(spec, rng)
        self.meters: list[Meter] = []

    async def add_frontend(self, config: RouterConfig) -> Dispatcher:
        host = f"frontend-{len(self.dispatchers) + 1}"
        meter = Meter()
        dispatcher = Dispatcher(
            self.registry.at(host),
            MeteredPlane(self.plane.at(host), meter),  # type: ignore[arg-type]
            rng=random.Random(self._rng.getrandbits(64)),
            config=config,
        )
        await dispatcher.__aenter__()
        self.meters.append(meter)
        self.dispatchers.append(dispatcher)
        return dispatcher


class _Scale:
    def __init__(self, size: Size, deployment: SimDeployment, rng: random.Random) -> None:
        self._size = size
        self._deployment = deployment
        self._rng = rng
        self._streams: dict[RequestId, SimPrompt] = {}
        self._measures = False
        self._failed = 0
        self._text = memoryview(bytes(4 * (PROMPT_TOKENS + SHARED_TOKENS)))
        self._outcome = Outcome([], Recording())

    async def run(self, *, with_restart: bool) -> Outcome:
        size, outcome = self._size, self._outcome
        loop = asyncio.get_running_loop()
        async with _MeteredCluster(self._deployment.cluster_spec(self._streams), self._rng) as cluster:
            for number in range(size.workers):
                await cluster.start(f"worker-{number}")
            for dispatcher in cluster.dispatchers:
                await dispatcher.serving()
            await asyncio.sleep(1.0)
            outcome.meters = list(cluster.meters)  # without that of a router that is started later
            begun_s = loop.time()
            async with asyncio.TaskGroup() as group:
                sending = group.create_task(self._send_all(cluster, group))
                await asyncio.sleep(size.ramp_s)
                self._begin(cluster)
                while loop.time() < begun_s + size.ramp_s + size.window_s:
                    await asyncio.sleep(_SAMPLE_S)
                    self._sample(cluster)
                self._end(cluster)
                if with_restart:
                    outcome.restart = await self._restart(cluster)
                sending.cancel()
                for task in asyncio.all_tasks():
                    if task.get_name() == "stream":
                        task.cancel()
        return outcome

    # -- requests

    async def _send_all(self, cluster: _MeteredCluster, group: asyncio.TaskGroup) -> None:
        size, loop = self._size, asyncio.get_running_loop()
        config = WorkloadConfig(
            requests=1_000_000,
            rate_per_s=size.per_worker_s * size.workers,
            input_tokens=PROMPT_TOKENS,
            output_tokens=OUTPUT_TOKENS,
            shared_prefix_tokens=SHARED_TOKENS,
            prefix_groups=GROUPS,
        )
        start_s = loop.time()
        for number, session in enumerate(make_sessions(config, random.Random(self._rng.getrandbits(64)))):
            wait_s = start_s + session.at_s - loop.time()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            group.create_task(self._stream(cluster, number, session), name="stream")

    async def _stream(self, cluster: _MeteredCluster, number: int, session: SimSession) -> None:
        loop = asyncio.get_running_loop()
        request = self._make(RequestId(f"r{number}"), session)
        router = number % len(cluster.dispatchers)
        self._streams[request.request_id] = session.prompt
        sent_s, is_first = loop.time(), True
        try:
            async with cluster.dispatchers[router].open(request) as stream:
                async for delta in stream:
                    if is_first and delta.token_ids:
                        is_first = False
                        if self._measures:
                            self._outcome.ttft_s.append(loop.time() - sent_s)
        except PenstockError:
            self._failed += 1
        finally:
            del self._streams[request.request_id]

    def _make(self, request_id: RequestId, session: SimSession) -> Request:
        block_size = self._deployment.graph.block_size
        tokens = session.turns[0].input_tokens
        hashes = session.prompt.block_hashes(block_size, 0, tokens // block_size)
        if self._measures and len(self._outcome.recording.prompts) < _PROMPTS_MAX:
            self._outcome.recording.prompts.append((hashes, tokens))
        return self._request(request_id, hashes, tokens)

    def _request(self, request_id: RequestId, hashes: HashArray, tokens: int) -> Request:
        return Request(
            request_id=request_id,
            model=self._deployment.graph.model,
            token_ids=PackedTokens(self._text[: 4 * tokens]),  # type: ignore[arg-type]
            sampling=SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True),
            block_hashes=PackedHashes(hashes.tobytes()),
            salt=SALT,
        )

    # -- measuring

    def _begin(self, cluster: _MeteredCluster) -> None:
        """Record the workers' content, and all that reaches the routers from now on."""
        recording = self._outcome.recording
        self._measures = True
        size = self._deployment.graph.block_size
        firsts = {prompt.shared.tobytes(): prompt for prompt in self._streams.values()}
        parts = [prompt.block_hashes(size, 0, SHARED_TOKENS // size)[:, 0] for prompt in firsts.values()]
        recording.shared = np.concatenate(parts)
        for server in cluster.plane.servers.values():
            messages = server.service.events().events_after(None)
            frames = [CODEC.encode(Event(message=message)) for message in messages if message is not None]
            recording.snapshots[WorkerId(int(server.service._identity.worker_id))] = frames  # type: ignore[attr-defined]
        recording.instances = [member.instance for member in self._members(cluster.dispatchers[0])]
        for meter in cluster.meters:
            meter.is_on = True

    def _members(self, dispatcher: Dispatcher) -> Sequence[FleetMember]:
        return [member for member in dispatcher._shared.fleet.slots.now() if member is not None]

    def _sample(self, cluster: _MeteredCluster) -> None:
        running = [
            worker.engine.load().running_requests + worker.engine.load().waiting_requests
            for worker in cluster.workers.values()
        ]
        self._outcome.in_flight.append(len(self._streams))
        self._outcome.unevenness.append(max(running) / (sum(running) / len(running)))

    def _end(self, cluster: _MeteredCluster) -> None:
        outcome = self._outcome
        for meter in cluster.meters:
            meter.is_on = False
        outcome.recording.frames = cluster.meters[0].frames
        outcome.recording.seconds = self._size.window_s
        self._measures = False
        sent = sorted(
            (at_s, router, worker_id)
            for router, meter in enumerate(cluster.meters)
            for at_s, worker_id, _ in meter.sent
        )
        outcome.decisions = len(sent)
        outcome.failed = self._failed
        outcome.same_worker_share = same_worker_share(sent)
        requests = {request_id for meter in cluster.meters for _, _, request_id in meter.sent}
        outcome.resent_share = 1 - len(requests) / len(sent) if sent else 0.0

    async def _restart(self, cluster: _MeteredCluster) -> Restart:
        """End the last router, whose streams break, and start another one in its place."""
        last = cluster.dispatchers.pop()
        await last.__aexit__(None, None, None)
        probes = [self._probe(number) for number in range(min(_PROBES, len(self._outcome.recording.prompts)))]

        async def start() -> Dispatcher:
            return await cluster.add_frontend(cluster.spec.router)

        return await measure_restart(tuple(cluster.dispatchers), start, probes)

    def _probe(self, number: int) -> Request:
        hashes, tokens = self._outcome.recording.prompts[-1 - number]
        return self._request(RequestId(f"probe{number}"), hashes, tokens)
