"""A worker that becomes one of another role while the others, and requests, go on."""

import asyncio

import pytest

from penstock.core.errors import EngineError, RequestError, Unavailable, WorkerLost
from penstock.core.types.instances import InstanceState, Role
from tests.support import kv_transfer_scene
from tests.support.kv_transfer import PRICES, tiny_engine
from tests.support.scenes import run_by


def run_scenario(scene, names=("p0", "d0"), *, engine=tiny_engine, **options):
    kv_transfer_scene.run_scenario(scene, names, engine=lambda _name: engine(), **options)


@pytest.mark.parametrize(
    ("names", "worker", "role", "status", "why"),
    [
        (("p0", "d0"), "x0", Role.DECODE, 404, "no worker 'x0'; known: d0, p0"),
        (("p0", "d0"), "p0", Role.PREFILL, 409, "is prefill already"),
        (("p0", "d0"), "d0", Role.PREFILL, 409, "last worker that answers for model tiny"),
        (("a0", "a1"), "a0", Role.DECODE, 409, "without a way to move KV"),
    ],
)
def test_refusals(names, worker, role, status, why):
    async def scene(cluster, dispatcher):
        with pytest.raises(RequestError, match=why) as refusal:
            await dispatcher.change_role(worker, role)
        assert refusal.value.http_status == status
        assert all(cluster.worker(name).instance.state is InstanceState.READY for name in names)

    run_scenario(scene, names, transport=lambda: None)


@run_by(run_scenario)
async def test_a_prefill_worker_whose_kv_would_end_answers_sooner(cluster, dispatcher):
    await cluster.start("p1", tiny_engine(60), role=Role.PREFILL, prices=PRICES)
    await asyncio.sleep(0.1)
    with pytest.raises(
        RequestError, match="p1 holds at most 240 tokens of a request and others that answer 400"
    ):
        await dispatcher.change_role("p1", Role.DECODE)


@run_by(run_scenario, ("p0", "d0", "d1", "d2"))
async def test_one_change_at_a_time(cluster, dispatcher):
    first = asyncio.ensure_future(dispatcher.change_role("d0", Role.AGGREGATED))
    await asyncio.sleep(0.01)
    with pytest.raises(RequestError, match="is becoming aggregated already"):
        await dispatcher.change_role("d0", Role.AGGREGATED)
    other = asyncio.ensure_future(dispatcher.change_role("d1", Role.PREFILL))
    await asyncio.sleep(0.01)
    with pytest.raises(RequestError, match="last worker that answers"):
        await dispatcher.change_role("d2", Role.PREFILL)
    await first
    await other
    await dispatcher.change_role("d2", Role.PREFILL)
    assert cluster.worker("d2").instance.role is Role.PREFILL


@pytest.mark.parametrize(
    ("how", "error"), [("stop", Unavailable), ("kill", WorkerLost), ("die", Unavailable)]
)
@run_by(run_scenario, ("p0", "d0", "d1"))
async def test_a_worker_that_stops_or_dies_meanwhile(cluster, dispatcher, *, how, error):
    change = asyncio.ensure_future(dispatcher.change_role("d0", Role.AGGREGATED))
    await asyncio.sleep(0.01)
    if how == "stop":
        cluster.worker("d0").stop()
    elif how == "kill":
        cluster.kill("d0")
    else:
        await cluster.engine("d0").close()
    with pytest.raises(error):
        await change
    await asyncio.sleep(1)
    assert isinstance(cluster.errors.get("d0"), EngineError) is (how == "die")


@run_by(run_scenario)
async def test_who_asked_may_go_and_the_change_goes_on(cluster, dispatcher):
    change = asyncio.ensure_future(dispatcher.change_role("p0", Role.DECODE))
    await asyncio.sleep(0.01)
    change.cancel()
    await asyncio.sleep(1)
    assert cluster.worker("p0").instance.role is Role.DECODE
    assert cluster.worker("p0").instance.state is InstanceState.READY
