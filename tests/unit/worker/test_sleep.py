"""A worker that sleeps and wakes while requests go on at the others."""

import asyncio

import pytest

from penstock.core.errors import EngineError, RequestError
from penstock.core.types.instances import InstanceState, Role
from penstock.router.fleet.member import Condition
from tests.support import kv_transfer_scene
from tests.support.cluster import MemoryCluster
from tests.support.kv_transfer import tiny_engine, tiny_request, whole_answer
from tests.support.manual_engine import ManualEngine
from tests.support.scenes import run_by


def run_scenario(scene, names=("a0", "a1"), *, engine=tiny_engine, **options):
    kv_transfer_scene.run_scenario(scene, names, engine=lambda _name: engine(), **options)


def view_of(dispatcher, name):
    return next(view for view in dispatcher.workers() if view.name == name)


@run_by(run_scenario)
async def test_a_worker_that_sleeps_gets_nothing_and_wakes_without_its_cache(cluster, dispatcher):
    expected = await whole_answer(dispatcher, tiny_request("a"))
    worker = dispatcher.explain("a")[-1].worker
    assert cluster.engine(worker).load().cached_blocks > 0
    changed = await dispatcher.sleep(worker, 1)
    assert (changed.worker, changed.state) == (worker, InstanceState.ASLEEP)
    assert changed.took_s < 0.2, "the notice, and a few turns of the loop"
    assert cluster.engine(worker).load().cached_blocks == 0
    await asyncio.sleep(0.1)
    view = view_of(dispatcher, worker)
    assert (view.state, view.condition) == (InstanceState.ASLEEP, Condition.ASLEEP)
    assert view.indexed_blocks == 0, "routers have heard that its cache is gone"
    assert view.load["cached_blocks"] == 0
    for number in range(4):
        assert (await whole_answer(dispatcher, tiny_request(f"b{number}")))[0] == expected[0]
        assert dispatcher.explain(f"b{number}")[-1].worker != worker
    other = ({"a0", "a1"} - {worker}).pop()
    assert (await dispatcher.wake_up(worker)).state is InstanceState.READY
    await dispatcher.sleep(other, 2)
    assert (await whole_answer(dispatcher, tiny_request("c")))[0] == expected[0]
    assert dispatcher.explain("c")[-1].worker == worker
    await dispatcher.wake_up(other)


@pytest.mark.parametrize(
    ("ask", "status", "why"),
    [
        (lambda d: d.sleep("x0", 1), 404, "no worker 'x0'; known: a0, a1"),
        (lambda d: d.wake_up("x0"), 404, "no worker 'x0'"),
        (lambda d: d.sleep("a0", 3), 400, "level: must be 1 or 2, got 3"),
        (lambda d: d.wake_up("a0"), 409, "worker a0 is awake already"),
        (lambda d: d.sleep("a1", 1), 409, "worker a1 is asleep already"),
        (lambda d: d.change_role("a1", Role.DECODE), 409, "worker a1 is asleep; wake it before"),
    ],
)
@run_by(run_scenario)
async def test_refusals(cluster, dispatcher, *, ask, status, why):
    await dispatcher.sleep("a1", 1)
    with pytest.raises(RequestError, match=why) as refusal:
        await ask(dispatcher)
    assert refusal.value.http_status == status
    assert "\n" not in refusal.value.message
    await dispatcher.wake_up("a1")


@pytest.mark.virtual
async def test_an_engine_that_cannot_sleep_is_not_drained():
    async with MemoryCluster() as cluster, cluster.dispatcher() as dispatcher:
        await cluster.start("a0", ManualEngine())
        await dispatcher.looked()
        with pytest.raises(RequestError, match="worker a0: engine of this worker cannot sleep") as refusal:
            await dispatcher.sleep("a0", 1)
        assert refusal.value.http_status == 409
        assert view_of(dispatcher, "a0").condition is Condition.READY


class Fragile(ManualEngine):
    """Its `sleep` and `wake_up` raise what a test sets."""

    error: Exception | None = None

    def check_sleep(self, level):
        pass

    async def sleep(self, level):
        await self._try()

    async def wake_up(self):
        await self._try()

    async def _try(self):
        await asyncio.sleep(1)
        if self.error is not None:
            raise self.error


@pytest.mark.virtual
async def test_an_engine_that_fails_to_sleep_serves_and_one_that_fails_to_wake_sleeps():
    async with MemoryCluster() as cluster, cluster.dispatcher() as dispatcher:
        engine = Fragile()
        await cluster.start("a0", engine)
        await dispatcher.looked()
        engine.error = RuntimeError("no room\nin host memory")
        with pytest.raises(EngineError, match="could not sleep: no room in host memory"):
            await dispatcher.sleep("a0", 1)
        await asyncio.sleep(0.1)
        assert view_of(dispatcher, "a0").condition is Condition.READY
        engine.error = None
        await dispatcher.sleep("a0", 1)
        engine.error = RuntimeError("no device memory")
        with pytest.raises(EngineError, match="could not wake up: no device memory"):
            await dispatcher.wake_up("a0")
        assert view_of(dispatcher, "a0").condition is Condition.ASLEEP
        engine.error = None
        await dispatcher.wake_up("a0")
        assert view_of(dispatcher, "a0").condition is Condition.READY
