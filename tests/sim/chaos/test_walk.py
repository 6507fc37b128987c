"""Many requests on a deployment that keeps losing workers: real workers and dispatchers, virtual time, seeded faults.

Whatever happens, every stream either equals what one undisturbed engine would have said or ends with one clear
error, and afterwards nothing is left anywhere: no request, no reservation, no block in use.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from msgspec.structs import replace

from penstock.core.errors import DeadlineExceeded, EngineError, Overloaded, PenstockError, Unavailable
from penstock.core.hashing import block_hashes
from penstock.core.ids import RequestId
from penstock.core.types.requests import Request, SamplingParams
from penstock.core.wire import pack_hashes, pack_tokens, unpack_tokens
from penstock.engine.batched import BatchedEngine
from penstock.engine.mock.engine import MockConfig, MockRunner, StepTiming, mock_engine
from penstock.engine.runner import RunnerInfo
from penstock.engine.scheduling.config import SchedulerConfig
from penstock.engine.scheduling.sequences import Sampled, SequenceTable, StepPlan
from penstock.router.config import RetryConfig, RouterConfig
from penstock.router.dispatch.dispatcher import Dispatcher
from penstock.router.workers.member import Condition
from penstock.sim.loop.loop import run_virtual
from penstock.worker.config import WorkerConfig
from tests.support.cluster import MemoryCluster

BLOCK_SIZE = 4
POISON = 666
SEEDS_THAT_FAILED: list[int] = []
"""Every seed that ever failed stays here."""

SHAPE = RunnerInfo(
    num_blocks=24, block_size=BLOCK_SIZE, context_length=400, vocab_size=1000, eos_token_ids=(999,)
)  # six long requests do not fit: there is preemption
SLOW = MockConfig(timing=StepTiming(step_s=0.02))
NARROW = SchedulerConfig(max_batch_tokens=16, max_running_requests=6, max_waiting_requests=1)


class PoisonableRunner(MockRunner):
    """Dies of a prompt with a certain token: the process is killed while it computes."""

    def __init__(self, on_poison: Callable[[], None]) -> None:
        super().__init__(SHAPE, SLOW)
        self._on_poison = on_poison

    async def run(self, plan: StepPlan, table: SequenceTable) -> Sampled:
        for slot in plan.slots[plan.num_decode :].tolist():
            if POISON in table.token_ids[slot, : table.num_prompt[slot]]:
                self._on_poison()
                await asyncio.Event().wait()  # no word any more
        return await super().run(plan, table)


def make_request(
    request_id: str, prompt: list[int], max_tokens: int, deadline_s: float | None = None
) -> Request:
    return Request(
        request_id=RequestId(request_id),
        model="tiny",
        token_ids=pack_tokens(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.7, seed=5, ignore_eos=True),
        salt=b"tiny-1",
        block_hashes=pack_hashes(block_hashes(prompt, BLOCK_SIZE, b"tiny-1")),
        deadline_s=deadline_s,
    )


async def reference(request: Request) -> list[int]:
    """Say what an engine that nobody disturbs answers. Each token depends on the prompt and its position."""
    engine = mock_engine(SHAPE, MockConfig(speedup=1e6))
    await engine.start()
    engine.submit(replace(request, deadline_s=None))
    output: list[int] = []
    async for step in engine.steps():
        for delta in step.deltas:
            output += unpack_tokens(delta.token_ids).tolist()
            if delta.finish_reason is not None:
                await engine.close()
    return output


class World:
    """Two frontends, some workers, and dice."""

    def __init__(self, cluster: MemoryCluster, dispatchers: list[Dispatcher], seed: int) -> None:
        self.cluster = cluster
        self.dispatchers = dispatchers
        self.rng = random.Random(seed)
        self.engines: dict[str, BatchedEngine] = {}
        self.all_engines: list[BatchedEngine] = []
        self.kills = self.names = 0
        self.outcomes: list[tuple[str, str, int]] = []  # request, how it ended, migrations
        self.poison_kills = 0

    async def start_worker(self, scheduler: SchedulerConfig = NARROW) -> None:
        self.names += 1
        name = f"w{self.names}"
        self.engines[name] = BatchedEngine(PoisonableRunner(lambda: self.on_poison(name)), scheduler)
        self.all_engines.append(self.engines[name])
        await self.cluster.start(name, self.engines[name], config=WorkerConfig(drain_timeout_s=0.5))

    def kill(self, name: str) -> None:
        self.kills += 1
        del self.engines[name]
        self.cluster.kill(name)

    def on_poison(self, name: str) -> None:
        self.poison_kills += 1
        self.kill(name)

    async def chaos(self, rounds: int) -> None:
        """Kill, drain, cut connections and start replacements; at least two workers are left standing."""
        for _ in range(rounds):
            await asyncio.sleep(self.rng.uniform(0.0, 0.4))
            name = self.rng.choice(sorted(self.engines))
            if len(self.engines) > 2:
                match self.rng.randrange(4):
                    case 0 | 1:
                        self.kill(name)
                    case 2:
                        self.cluster.worker(name).stop()
                        del self.engines[name]
                    case 3:
                        self.cut(name)
            if len(self.engines) < 4:
                await self.start_worker()

    def cut(self, name: str) -> None:
        server = self.cluster.plane._servers[self.cluster.worker(name).instance.address]
        if server.links:
            self.rng.choice(server.links).break_off("the cable was cut", tell_service=True)

    async def client(self, number: int) -> None:
        rng = random.Random(self.rng.getrandbits(64))
        await asyncio.sleep(rng.uniform(0.0, 1.5))
        prompt = list(range(rng.choice([0, 8, 16, 24]))) + [
            rng.randrange(500) for _ in range(rng.randrange(1, 9))
        ]
        max_tokens = rng.randrange(1, 40)
        request = make_request(f"r{number}", prompt, max_tokens, rng.choice([None, None, 0.3, 5.0]))
        leave_after = rng.choice([None, None, rng.randrange(10)])
        output: list[int] = []
        outcome = "left"
        stream = rng.choice(self.dispatchers).open(request)
        try:
            async with stream:
                async for delta in stream:
                    output += unpack_tokens(delta.token_ids).tolist()
                    outcome = str(delta.finish_reason or "left")
                    if leave_after is not None and len(output) >= leave_after:
                        break
                    await asyncio.sleep(rng.choice([0.0, 0.0, 0.1]))  # some read slowly
        except (Overloaded, Unavailable, EngineError) as error:
            outcome = error.code
        except DeadlineExceeded as error:
            outcome = error.code if request.deadline_s is not None else "a deadline that nobody set"
        expected = await reference(request)
        assert output == expected[: len(output)], f"{request.request_id}: a gap or a repetition"
        assert outcome != "length" or output == expected
        assert outcome != "a deadline that nobody set"
        assert stream.prompt_tokens == len(prompt)
        self.outcomes.append((request.request_id, outcome, stream.migrations))

    def check(self) -> None:
        for dispatcher in self.dispatchers:
            dispatcher.check()

    def check_at_rest(self) -> None:
        """Nothing is left, and every index says what its workers hold."""
        self.check()
        assert not any(engine.load().failed_steps for engine in self.all_engines)
        for name, engine in self.engines.items():
            load = engine.load()
            assert load.running_requests == load.waiting_requests == load.active_blocks == 0, name
            engine.pool.check()
            self.cluster.worker(name).check()
        for dispatcher in self.dispatchers:
            assert not dispatcher._shared.requests
            views = dispatcher.workers()
            assert {view.name for view in views if view.condition is Condition.READY} == self.engines.keys()
            for view in views:
                assert view.open_requests == view.reserved_requests == 0
                assert view.reserved_blocks == view.reserved_prefill_tokens == 0
            tree = dispatcher._shared.fleet.tree
            for view in views:
                member = dispatcher._shared.fleet._members[view.worker_id]
                resident = self.engines[view.name].pool.resident_hashes()
                assert set(tree.hashes_of(member.slot).tolist()) == set(resident[:, 0].tolist())


@dataclass(frozen=True)
class Outcome:
    requests: list[tuple[str, str, int]]  # id, how it ended, migrations
    kills: int
    preemptions: int
    prefix_hit_tokens: int
    ended_s: float


async def scenario(seed: int) -> Outcome:
    config = RouterConfig(no_worker_wait_s=2.0)
    async with (
        MemoryCluster(seed, lease_ttl_s=1.0) as cluster,
        cluster.dispatcher(config) as one,
        cluster.dispatcher(config) as two,
    ):
        world = World(cluster, [one, two], seed)
        for _ in range(4):
            await world.start_worker()
        async with asyncio.TaskGroup() as group:
            for number in range(40):
                group.create_task(world.client(number))
            group.create_task(world.chaos(12))
            checks = group.create_task(check_often(world))
            await asyncio.sleep(12.0)
            checks.cancel()
        await asyncio.sleep(3.0)
        world.check_at_rest()
        loads = [engine.load() for engine in world.all_engines]
        return Outcome(
            world.outcomes,
            world.kills,
            sum(load.preemptions for load in loads),
            sum(load.prefix_hit_tokens for load in loads),
            asyncio.get_running_loop().time(),
        )


async def check_often(world: World) -> None:
    while True:
        await asyncio.sleep(0.037)
        world.check()


@pytest.mark.parametrize("seed", [*range(20), *SEEDS_THAT_FAILED])
def test_streams_survive_what_happens_to_workers(seed):
    outcome = run_virtual(scenario(seed))
    assert len(outcome.requests) == 40
    assert outcome.kills >= 1


def test_faults_do_happen_and_few_requests_fail():
    outcomes = [run_virtual(scenario(seed)) for seed in range(100, 106)]
    assert sum(outcome.preemptions for outcome in outcomes) > 0
    assert all(outcome.prefix_hit_tokens > 0 for outcome in outcomes)
    requests = [request for outcome in outcomes for request in outcome.requests]
    assert sum(migrations for _, _, migrations in requests) >= 20
    ends = Counter(how for _, how, _ in requests)
    assert ends.total() == 240
    assert ends["length"] > 100
    assert ends["left"] > 20
    assert ends["deadline_exceeded"] > 5
    assert ends["unavailable"] + ends["engine_error"] + ends["overloaded"] < 24, ends


def test_the_same_seed_is_the_same_run():
    assert run_virtual(scenario(7)) == run_virtual(scenario(7))


def test_a_poisonous_prompt_takes_three_workers_and_no_more():
    async def main() -> None:
        config = RouterConfig(no_worker_wait_s=2.0, retries=RetryConfig(quarantine_s=30.0))
        async with MemoryCluster(lease_ttl_s=1.0) as cluster, cluster.dispatcher(config) as dispatcher:
            world = World(cluster, [dispatcher], 0)
            for _ in range(6):
                await world.start_worker()
            await asyncio.sleep(0.1)
            good = asyncio.ensure_future(world.client(1))

            async def ask(request_id: str) -> PenstockError:
                request = make_request(request_id, [1, POISON, 2], 5)

                async def read() -> None:
                    async with dispatcher.open(request) as stream:
                        async for _ in stream:
                            pass

                with pytest.raises(PenstockError) as caught:
                    await read()
                return caught.value

            first = await ask("poison-1")
            assert isinstance(first, Unavailable)
            assert "refused for 30 s" in str(first)
            assert world.poison_kills == 3
            for number in range(2, 6):
                assert "refused for" in str(await ask(f"poison-{number}"))
            assert world.poison_kills == 3
            await good
            await asyncio.sleep(31.0)
            await ask("poison-later")  # it is given another chance, and kills again
            assert world.poison_kills == 6
            await asyncio.sleep(3.0)
            world.check_at_rest()

    run_virtual(main())


def test_killing_the_busiest_worker_under_load_loses_nothing():
    """What one worker ran goes on at once: no client sees an error."""

    async def main() -> None:
        async with MemoryCluster(lease_ttl_s=1.0) as cluster, cluster.dispatcher() as dispatcher:
            world = World(cluster, [dispatcher], 0)
            for _ in range(3):
                await world.start_worker(SchedulerConfig(max_running_requests=100))
            await asyncio.sleep(0.1)
            requests = {number: make_request(f"r{number}", [number], 50) for number in range(120)}
            results: dict[int, list[int]] = {}

            async def client(number: int, request: Request) -> None:
                async with dispatcher.open(request) as stream:
                    results[number] = [
                        t async for delta in stream for t in unpack_tokens(delta.token_ids).tolist()
                    ]

            async with asyncio.TaskGroup() as group:
                for number, request in requests.items():
                    group.create_task(client(number, request))
                await asyncio.sleep(0.5)
                world.kill(max(world.engines, key=lambda name: world.engines[name].load().running_requests))
            assert results == {number: await reference(request) for number, request in requests.items()}
            await asyncio.sleep(3.0)
            world.check_at_rest()

    run_virtual(main())
