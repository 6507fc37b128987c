"""One chaos trial: clients stream from a deployment under random faults, and all invariants are checked."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
import numpy as np

from penstock.core.errors import PenstockError
from penstock.core.hashing import block_hashes
from penstock.core.ids import RequestId
from penstock.core.native import native
from penstock.core.types.events import Tier
from penstock.core.types.instances import ModelCard, Role
from penstock.core.types.requests import Request, SamplingParams
from penstock.core.wire import HashArray, pack_tokens, unpack_tokens
from penstock.engine.runner import RunnerInfo
from penstock.engine.scheduling.config import SchedulerConfig
from penstock.perf.hardware import find_hardware
from penstock.perf.model_config import shape_of
from penstock.perf.roofline import Factors, Roofline
from penstock.router.config import DisaggConfig, QueueConfig, RouterConfig
from penstock.router.dispatch.open_request import OpenRequest
from penstock.runtime.config import PlaneConfig
from penstock.sim.chaos import (
    Chaos,
    DirectReader,
    Fault,
    StreamChecker,
    check_at_rest,
    check_now,
    keep_checking,
    random_faults,
    touch_every_worker,
)
from penstock.sim.cluster import ClusterSpec, SimCluster, SimEngine, WorkerSpec
from penstock.sim.engine import ExactEngine, JumpEngine
from penstock.sim.engine_timing import VOCAB_SIZE, HostPace, LowerTier, no_layout, reference
from penstock.sim.loop import SimLoop, run
from penstock.sim.network import NetworkConfig
from penstock.worker.config import KvTransferConfig, WorkerConfig

_BLOCK_SIZE = 4
_BLOCK_BYTES = 1 << 16
_LINK_BYTES_PER_S = 5e7
"""Slow, so that a KV transfer lasts several engine steps."""
_SALT = b"trial"
_SHAPE = {
    "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32,
    "intermediate_size": 14336, "vocab_size": 128256,
}  # fmt: skip
_SLOWNESS = 5.0
"""Factor on the latency model, so that streams last long enough to meet faults."""
_CHECK_EVERY_S = 0.05
_LONGEST_S = 60.0
"""Deadline for the end of all requests; a deployment with periodic timers would otherwise run for ever."""
_QUIET_S = 12.0
"""Longer than any lease, drain and reconnection."""
_CONVERGED_S = 40.0
"""Longer than the longest resync delay of an event subscriber (`resync_timeout_s_max`)."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Size and deployment of one chaos trial.

    `exact`: engines run every step; otherwise they jump between events, which takes native code. `kv_events`: workers send KV events. `hold_s`:
    `threshold_s` of the routers' queues. `host_blocks`: engines are slow and have a slow host tier, and several
    prompts share prefixes. `failed_steps`: number of steps of exact engines that fail, each on a random worker.
    `prefill_workers`: number of prefill workers for all but the shortest prompts; `workers` then decode. `jitter_s`: most of a
    message's random delay; with a long one a frontend gets several steps at once.
    """

    clients: int = 30
    workers: int = 3
    faults: int = 12
    duration_s: float = 5.0
    exact: bool = True
    kv_events: bool = True
    hold_s: float | None = None
    host_blocks: int = 0
    prefill_workers: int = 0
    failed_steps: int = 0
    jitter_s: float = 0.002

    @property
    def roles(self) -> tuple[Role, ...]:
        """Roles of the workers, in start order."""
        if not self.prefill_workers:
            return (Role.AGGREGATED,) * self.workers
        return (Role.DECODE,) * self.workers + (Role.PREFILL,) * self.prefill_workers


@dataclass(slots=True)
class TrialResult:
    """Result of a trial. `outcomes` counts finish reasons, error codes, and readers that `left`."""

    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[Fault] = field(default_factory=list)
    migrations: int = 0
    onboarded_tokens: int = 0
    kv_transfers: int = 0
    """Requests whose prompt ran on a prefill worker."""
    direct_tokens: int = 0
    """Output tokens that went to their clients by a rule, without the router's reader."""
    moved_bytes: int = 0
    """Bytes of KV transfers between workers."""
    end_s: float = 0.0


def run_trial(seed: int, trial: Trial | None = None) -> TrialResult:
    """Run one trial on virtual time.

    Raises:
        AssertionError: an invariant does not hold.
        Deadlock: every task waits and no timer is set.
    """
    try:
        return run(lambda rng: _trial(rng, trial or Trial()), seed)
    except BaseExceptionGroup as group:
        raise _first(group) from group


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def small_spec(trial: Trial | None = None) -> ClusterSpec:
    """Make a spec with two frontends, and KV pools and queues small enough to fill up."""
    trial = trial or Trial()
    factors = Factors(gemm=0.06, storage_bytes_per_s={Tier.HOST: 2e9}) if trial.host_blocks else Factors()
    model = Roofline(shape_of(_SHAPE, name="trial"), find_hardware("h100"), factors=factors)
    info = RunnerInfo(
        num_blocks=48,
        block_size=_BLOCK_SIZE,
        context_length=160,
        vocab_size=VOCAB_SIZE,
        kv_bytes_per_block=_BLOCK_BYTES,
        kv_layout=no_layout(_BLOCK_BYTES, _BLOCK_SIZE, num_blocks=48),
    )
    lower_tiers = (LowerTier(Tier.HOST, trial.host_blocks),) if trial.host_blocks else ()
    scheduler = SchedulerConfig(max_batch_tokens=24, max_running_requests=6, max_waiting_requests=12)

    def make_engine(pace: HostPace) -> SimEngine:
        pace.factor = _SLOWNESS
        if trial.exact or native is None:
            return ExactEngine(model, info, scheduler, pace, lower_tiers=lower_tiers)
        return JumpEngine(model, info, scheduler, _PositionStream, pace=pace, lower_tiers=lower_tiers)

    return ClusterSpec(
        card=ModelCard(name="trial", context_length=160, block_size=_BLOCK_SIZE, salt=_SALT),
        workers=dict.fromkeys(trial.roles, WorkerSpec(make_engine)),
        router=RouterConfig(
            policy="least-loaded" if trial.prefill_workers else "kv",  # chooses remote prefill at any cost
            disagg=DisaggConfig(remote_tokens_min=_BLOCK_SIZE, link_bytes_per_s=_LINK_BYTES_PER_S),
            no_worker_wait_s=2.0,
            connect_timeout_s=1.0,
            reconnect_s_max=1.0,
            predicted_s=_CONVERGED_S / 2,
            queue=QueueConfig(threshold_s=trial.hold_s),
        ),
        worker=WorkerConfig(
            drain_timeout_s=0.5,
            kv_events=trial.kv_events,
            kv_transfer=KvTransferConfig(pin_ttl_s=1.0, fetches_max=6),
        ),
        network=NetworkConfig(latency_s=0.001, jitter_s=trial.jitter_s, event_loss=0.05, lease_ttl_s=1.0),
        plane=PlaneConfig(window_tokens=8, heartbeat_timeout_s=1.0),
        frontends=2,
    )


class _PositionStream:
    """Names the blocks of a prompt and of a jump engine's output, whose token ids are their positions."""

    def __init__(self, request: Request) -> None:
        self._request = request

    def block_hashes(self, block_size: int, start: int, end: int) -> HashArray:
        request = self._request
        prompt = unpack_tokens(request.token_ids)
        more = np.arange(end * block_size - len(prompt), dtype="<i4") + request.num_emitted
        tokens = np.concatenate((prompt, more))
        return block_hashes(tokens[: end * block_size], block_size, request.salt)[start:end]


async def _trial(rng: random.Random, trial: Trial) -> TrialResult:
    result = TrialResult()
    async with SimCluster(small_spec(trial), rng) as cluster:
        for number, role in enumerate(trial.roles):
            await cluster.start(f"worker-{number}", role)
        for dispatcher in cluster.dispatchers:
            await dispatcher.serving()
        chaos = Chaos(cluster)
        async with asyncio.TaskGroup() as group:
            checks = group.create_task(keep_checking(cluster, _CHECK_EVERY_S), name="checks")
            async with _limited(trial.duration_s + _LONGEST_S), asyncio.TaskGroup() as clients:
                for number in range(trial.clients):
                    client = _Client(cluster, number, random.Random(rng.getrandbits(64)), trial)
                    clients.create_task(client.run(result), name=f"client {number}")
                clients.create_task(
                    chaos.run(random_faults(rng, count=trial.faults, duration_s=trial.duration_s)),
                    name="chaos",
                )
                if trial.failed_steps:
                    failures = _fail_steps(cluster, random.Random(rng.getrandbits(64)), trial)
                    clients.create_task(failures, name="failing steps")
            await asyncio.sleep(_QUIET_S)
            checks.cancel()
        cluster.network.event_loss = 0.0
        await touch_every_worker(
            cluster, [_request(f"touch-{n}", [n, *range(9)], 2) for n in range(len(cluster.workers))]
        )
        await asyncio.sleep(_CONVERGED_S)
        check_at_rest(cluster)
        result.faults = chaos.done
        engines = [worker.engine.load() for worker in cluster.workers.values()]
        result.moved_bytes = cluster.sim_transports.received_bytes.total()
        result.onboarded_tokens = sum(sum(load.onboarded_tokens) for load in engines)
        result.end_s = asyncio.get_running_loop().time()
    check_no_task_left()
    return result


async def _fail_steps(cluster: SimCluster, rng: random.Random, trial: Trial) -> None:
    """Make steps fail at random moments on random workers; replace workers that end by it."""
    loop = asyncio.get_running_loop()
    start_s = loop.time()
    for number, at_s in enumerate(
        sorted(rng.uniform(0.0, trial.duration_s) for _ in range(trial.failed_steps))
    ):
        await asyncio.sleep(start_s + at_s - loop.time())
        if len(cluster.workers) < len(trial.roles):
            await cluster.start(f"successor-{number}")
        rng.choice(list(cluster.workers.values())).pace.failing_steps = 1


@asynccontextmanager
async def _limited(seconds: float) -> AsyncIterator[None]:
    """Raise AssertionError with the waiting tasks if the body takes longer."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimLoop), "on virtual time"
    waiting: list[str] = []
    limit = loop.call_later(seconds, lambda: waiting.extend(loop.waiting()))
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise AssertionError(
            f"requests had not ended after {seconds:g} s:\n  " + "\n  ".join(waiting)
        ) from error
    finally:
        limit.cancel()


def check_no_task_left() -> None:
    """Raise AssertionError if any task but the calling one is left."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    assert not others, f"tasks are left: {sorted(task.get_name() for task in others)}"


class _Client:
    """Sends one request at a random moment and reads its stream, fast or slowly, possibly not to the end.

    Two of three read as a frontend's clients do; the third iterates.
    """

    def __init__(self, cluster: SimCluster, number: int, rng: random.Random, trial: Trial) -> None:
        self._cluster = cluster
        self._rng = rng
        self._exact = trial.exact
        self._start_s = rng.uniform(0.0, trial.duration_s)
        # Several shared prefixes, so that one has been evicted from the device when it is next used.
        first = 24 * rng.randrange(8) if trial.host_blocks else 0
        shared = list(range(first, first + rng.choice([0, 8, 16, 24])))
        self._prompt = shared + [rng.randrange(500) for _ in range(rng.randrange(1, 20))]
        deadline_s = rng.choice([None, None, None, 0.2, 1.0, 5.0])
        self._request = msgspec.structs.replace(
            _request(f"request-{number}", self._prompt, rng.randrange(1, 60), deadline_s),
            tenant="ab"[number % 2],
            priority=number % 3 - 1,
        )
        self._leaves_after = rng.choice([None, None, None, rng.randrange(20)])
        self._pause_s = rng.choice([0.0, 0.0, 0.02])
        self._is_direct = number % 3 > 0

    async def run(self, result: TrialResult) -> None:
        await asyncio.sleep(self._start_s)
        loop = asyncio.get_running_loop()
        max_tokens = self._request.sampling.max_tokens
        expected = reference(self._prompt, max_tokens) if self._exact else range(max_tokens)
        witness = StreamChecker(self._request, expected, loop.time())
        stream = self._rng.choice(self._cluster.dispatchers[: self._cluster.spec.frontends]).open(
            self._request
        )
        error: PenstockError | None = None
        reader = DirectReader(witness, pause_s=self._pause_s, leaves_after=self._leaves_after)
        try:
            async with stream:
                if self._is_direct:
                    await reader.read(stream)
                else:
                    await self._iterate(stream, witness)
        except PenstockError as problem:
            error = problem
        if error is None and witness.finish_reason is None:
            outcome = "left"
            assert self._leaves_after is not None, (
                f"{self._request.request_id}: ended without a finish reason"
            )
        else:
            outcome = error.code if error else str(witness.finish_reason)
            # The reader paused once at the end, and once more with deltas left to read.
            witness.end(error, loop.time(), grace_s=2 * self._pause_s)
            assert error is not None or stream.output_tokens == witness.received, (
                f"{self._request.request_id}: {stream.output_tokens} tokens are counted, {witness.received} came"
            )
        check_now(self._cluster)
        result.outcomes[outcome] += 1
        result.migrations += stream.migrations
        result.kv_transfers += stream.kv_transfers
        result.direct_tokens += reader.rule.tokens

    async def _iterate(self, stream: OpenRequest, witness: StreamChecker) -> None:
        async for delta in stream:
            witness.see(delta)
            if self._leaves_after is not None and witness.received >= self._leaves_after:
                break
            if delta.finish_reason is None:
                await asyncio.sleep(self._pause_s)


def _request(name: str, prompt: list[int], max_tokens: int, deadline_s: float | None = None) -> Request:
    return Request(
        request_id=RequestId(name),
        model="trial",
        token_ids=pack_tokens(prompt),
        sampling=SamplingParams(max_tokens=max_tokens),
        salt=_SALT,
        deadline_s=deadline_s,
    )
