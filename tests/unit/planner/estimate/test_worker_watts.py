"""What workers draw, as the price of a budget in watts."""

import asyncio
from dataclasses import replace

import pytest

from penstock.core.types.instances import Role
from penstock.planner.estimate.worker_watts import WorkerWatts
from penstock.planner.observe.observation import WorkerView
from penstock.runtime.observations import Digest, GpuUse
from penstock.sim.loop.loop import run_virtual
from tests.support.planner_world import World

A = Role.AGGREGATED
IDLE = WorkerView("a", A, 60.0, Digest(), 0, 0, 0, 0, 0, 0, 0, 0)


def drawing(watts, utilization=0.9, limit_watts=700.0):
    return replace(IDLE, gpu=GpuUse(watts=watts, limit_watts=limit_watts, utilization=utilization))


def learned(*views, sheet=1275.0):
    watts = WorkerWatts({A: sheet})
    for view in views:
        watts.learn([view])
    return watts.measured


def test_the_most_that_a_busy_worker_drew_counts_with_its_share_of_the_host():
    assert learned(*[drawing(400.0)] * 11, drawing(423.0)) == {A: 1000.0}, "423 W and 575 W of the host"
    assert learned(*[drawing(423.0)] * 12, sheet=500.0) == {A: 430.0}, "no host beyond the limit"


@pytest.mark.parametrize("view", [IDLE, drawing(100.0, utilization=0.1)])
def test_idle_and_unknown_workers_tell_nothing(view):
    assert learned(*[view] * 50) == {}
    assert learned(*[drawing(400.0)] * 11) == {}, "too short"


class Metered(World):
    """Its workers' GPUs draw `watts`."""

    watts = 1000.0

    async def observe(self, seconds):
        seen = await super().observe(seconds)
        use = GpuUse(watts=self.watts, limit_watts=700.0, utilization=0.9)
        return replace(seen, workers=tuple(replace(each, gpu=use) for each in seen.workers))


def planned(watts, budget):
    async def main():
        world = Metered({A: 1}, price=700.0, budget={"watts": budget}, cool_down_s=10)
        world.watts = watts
        world.rate_per_s = 200.0
        for _ in range(30):
            record = await world.planner.step()
            await asyncio.sleep(5)
        return record

    return run_virtual(main())


def test_a_budget_in_watts_pays_for_what_is_drawn():
    record = planned(watts=350.0, budget=2100.0)
    assert record.watts == {A: 350.0}
    assert record.target == {A: 6}
    assert planned(watts=700.0, budget=2100.0).target == {A: 3}
    assert record.seen.roles[0].gpu_watts == pytest.approx(350.0 * record.seen.roles[0].workers)
    assert record.seen.roles[0].gpu_utilization == pytest.approx(0.9)


def test_a_worker_that_draws_more_than_the_budget_runs_all_the_same():
    assert planned(watts=900.0, budget=800.0).target == {A: 1}
