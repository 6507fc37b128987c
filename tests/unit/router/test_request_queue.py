"""Requests that are held while every worker is busy, on virtual time, with real workers and engines driven by hand."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec
import numpy as np
import pytest
from structlog.testing import capture_logs

from penstock.core.errors import DeadlineExceeded, Unavailable
from penstock.core.types.requests import FinishReason
from penstock.router.config import QueueConfig, RouterConfig
from penstock.router.dispatch.dispatcher import Dispatcher
from penstock.sim.loop import run_virtual
from tests.support.cluster import MemoryCluster
from tests.support.manual_engine import ManualEngine
from tests.support.scene import make_request
from tests.support.scenes import scenes


class Slow:
    """Each request at a worker takes a second, on one of its ranks; a prompt costs a second a token."""

    name = "slow"
    term_names = ("queue", "kv_wait", "prefill")

    def costs(self, context):
        return self.terms(context).sum(axis=0)

    def terms(self, context):
        waits = context.running_requests / context.prices.prompts_at_once
        return np.stack((waits, 0 * waits, 0 * waits + context.request_tokens))


class Homes(Slow):
    """Prompts of three tokens are at home on the first worker, longer ones on the second; the other costs ten times as much."""

    def terms(self, context):
        terms = super().terms(context)
        terms[2, 1 if context.request_tokens == 3 else 0] *= 10
        return terms


class Queueing(ManualEngine):
    """Says that somebody waits while it has anything to do."""

    def load(self):
        return msgspec.structs.replace(super().load(), waiting_requests=len(self.requests))


class Computing(ManualEngine):
    """Says that nobody waits, and that it has prompts to compute."""

    def load(self):
        return msgspec.structs.replace(super().load(), queued_prefill_tokens=3 * len(self.requests))


class Interleaving(Computing):
    """Lets a tenant's prompt overtake another's that it has begun."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.info = msgspec.structs.replace(self.info, interleaves_tenants=True)


class Setting:
    def __init__(
        self, cluster: MemoryCluster, dispatcher: Dispatcher, engines: dict[str, ManualEngine]
    ) -> None:
        self.cluster = cluster
        self.dispatcher = dispatcher
        self.engines = engines
        self.sent: list[str] = []

    @property
    def num_queued(self) -> int:
        self.dispatcher.check()
        return self.dispatcher.queued()[0]

    def running(self) -> set[str]:
        return {str(name) for engine in self.engines.values() for name in engine.requests}

    def finish(self, request_id: str) -> None:
        (engine,) = (e for e in self.engines.values() if request_id in e.requests)
        engine.emit(request_id, 9, finish=FinishReason.STOP)

    async def read(self, name: str, *, tokens: int = 3, **fields: object) -> None:
        async with self.dispatcher.open(make_request(name, range(tokens), **fields)) as stream:
            self.sent.append(name)
            async for _ in stream:
                pass


def run_scenario(
    scene: Callable[[Setting, asyncio.TaskGroup], Awaitable[None]],
    *,
    num_workers: int = 1,
    make_engine: Callable[[], ManualEngine] = Queueing,
    policy: type[Slow] = Slow,
    adapters: Mapping[str, Sequence[str]] = {},
    **queue: object,
) -> None:
    """Have a scene with workers that have room for one request each, and check that nothing is left of it."""

    async def main() -> None:
        settings = QueueConfig(**({"threshold_s": 0.5} | queue))
        config = RouterConfig(policy=f"{__name__}:{policy.__name__}", queue=settings)
        async with MemoryCluster() as cluster, cluster.dispatcher(config) as dispatcher:
            engines = {f"w{number}": make_engine() for number in range(1, num_workers + 1)}
            for name, engine in engines.items():
                await cluster.start(name, engine, adapters=adapters.get(name, ()))
            await asyncio.sleep(0.01)
            setting = Setting(cluster, dispatcher, engines)
            async with asyncio.TaskGroup() as group:
                await scene(setting, group)
            await asyncio.sleep(0.2)
            assert setting.num_queued == 0
            assert not any(worker.open_requests for worker in dispatcher.workers())

    run_virtual(main())


scenario = scenes(run_scenario, 2)


@pytest.mark.parametrize(
    ("policy", "queue", "warns"),
    [
        ("least-loaded", {"threshold_s": 3}, True),
        ("round-robin", {"requests_max": 9}, True),
        ("least-loaded", {}, False),
        ("least-loaded", {"threshold_s": None}, False),
        ("kv", {"threshold_s": 3}, False),
        ("session", {"threshold_s": 3}, False),
    ],
)
@pytest.mark.virtual
async def test_queue_settings_without_effect_are_logged_at_the_start(policy, queue, warns):
    async with MemoryCluster() as cluster:
        with capture_logs() as logs:
            async with cluster.dispatcher(RouterConfig(policy=policy, queue=queue)):
                pass
    told = [line for line in logs if line["event"] == "queue_without_effect"]
    assert [(line["log_level"], line["policy"]) for line in told] == [("warning", policy)] * warns


@scenario(num_workers=2, policy=Homes, work_weight=1.0)
async def test_a_worker_that_gets_free_takes_who_costs_least_there(setting, group):
    for name, tokens in (("a", 3), ("b", 4), ("first's", 3), ("second's", 4)):
        group.create_task(setting.read(name, tokens=tokens))
        await asyncio.sleep(0.1)
    assert setting.num_queued == 2
    setting.finish("b")
    await asyncio.sleep(0.1)
    assert setting.running() == {"a", "second's"}
    setting.finish("a")
    await asyncio.sleep(0.1)
    assert setting.running() == {"first's", "second's"}
    for name in ("first's", "second's"):
        setting.finish(name)


@scenario(num_workers=2)
async def test_who_has_begun_and_lost_its_worker_waits_for_no_room(setting, group):
    for name in "ab":
        group.create_task(setting.read(name))
    await asyncio.sleep(0.1)
    (lost,) = (name for name, engine in setting.engines.items() if "a" in engine.requests)
    setting.cluster.kill(lost)
    await asyncio.sleep(0.1)
    del setting.engines[lost]
    assert setting.running() == {"a", "b"}
    for name in "ab":
        setting.finish(name)


@scenario()
async def test_a_held_request_ends_by_its_deadline(setting, group):
    group.create_task(setting.read("a"))
    await asyncio.sleep(0.1)
    began_s = asyncio.get_running_loop().time()
    with pytest.raises(DeadlineExceeded):
        await setting.read("b", deadline_s=2.0)
    assert asyncio.get_running_loop().time() - began_s == pytest.approx(2.0)
    setting.finish("a")


@scenario()
async def test_a_shutdown_ends_those_held(setting, group):
    async with setting.cluster.dispatcher(
        RouterConfig(policy=f"{__name__}:Slow", queue={"threshold_s": 0.5})
    ) as other:
        await other.serving()
        ending = Setting(setting.cluster, other, setting.engines)
        readers = [asyncio.ensure_future(ending.read(name)) for name in "ab"]
        await asyncio.sleep(0.1)
        assert ending.num_queued == 1
    outcomes = await asyncio.gather(*readers, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [Unavailable, Unavailable]


@scenario(num_workers=2, adapters={"w1": ["a"]}, work_weight=0)
async def test_a_lane_that_waits_for_its_worker_keeps_that_one_and_no_other(setting, group):
    group.create_task(setting.read("a1", adapter="a"))
    await asyncio.sleep(0.1)
    group.create_task(setting.read("a2", adapter="a"))
    await asyncio.sleep(0.1)
    assert setting.num_queued == 1, "only the first worker has the adapter"
    group.create_task(setting.read("any"))
    await asyncio.sleep(0.1)
    assert setting.num_queued == 1
    assert setting.engines["w2"].requests.keys() == {"any"}
    group.create_task(setting.read("late"))
    await asyncio.sleep(0.1)
    setting.finish("a1")
    await asyncio.sleep(0.1)
    assert setting.running() == {"a2", "any"}, "the first worker is kept for who came first"
    for name in ("a2", "any", "late"):
        setting.finish(name)
        await asyncio.sleep(0.1)


@scenario(make_engine=Interleaving)
async def test_a_tenant_below_its_share_gets_in_beside_one_prompt_of_another(setting, group):
    for name, tenant in (("z0", "z"), ("z1", "z"), ("b0", "b"), ("c0", "c"), ("b1", "b"), ("z2", "z")):
        group.create_task(setting.read(name, tenant=tenant))
        await asyncio.sleep(0.1)
    assert setting.running() == {"z0", "z1"}
    for done, running in (
        ("z0", {"z1", "b0"}),
        ("z1", {"b0", "c0"}),  # b1 does not overtake its own tenant's
        ("b0", {"c0", "b1"}),
        ("b1", {"c0", "z2"}),
        ("z2", {"c0"}),
        ("c0", set()),
    ):
        setting.finish(done)
        await asyncio.sleep(0.1)
        assert setting.running() == running
