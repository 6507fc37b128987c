"""The planner on a deployment in memory, in virtual time."""

import asyncio
import contextlib
import itertools

import pytest
import structlog

from penstock.core.errors import ConfigError, Unavailable
from penstock.core.types.instances import Role
from penstock.planner.config import PlannerConfig
from penstock.planner.demand import SloTargets
from tests.support.planner_world import World

A, P, D = Role.AGGREGATED, Role.PREFILL, Role.DECODE


@contextlib.asynccontextmanager
async def running(world):
    async with asyncio.TaskGroup() as group:
        task = group.create_task(world.planner.run())
        yield
        task.cancel()


@pytest.mark.virtual
async def test_workers_follow_a_step_of_load_up_and_down():
    world = World({A: 1}, max_workers=16)
    async with running(world):
        await asyncio.sleep(400)
        assert await world.counts() == {A: 1}
        world.rate_per_s = 60.0
        await asyncio.sleep(120)
        peak = (await world.counts())[A]
        assert world.needed(60.0) <= peak <= world.needed(2 * 60.0)
        world.rate_per_s = 5.0
        await asyncio.sleep(90)
        assert (await world.counts())[A] == peak, "cools down"
        await asyncio.sleep(1500)
        assert await world.counts() == {A: world.needed(5.0)}


@pytest.mark.parametrize("traffic_s", [60, 150, 600])
@pytest.mark.parametrize("left_per_s", [0.0, 0.05])
@pytest.mark.virtual
async def test_traffic_that_has_ended_is_not_expected_however_little_there_was(traffic_s, left_per_s):
    world = World({A: 1}, max_workers=3)
    async with running(world):
        world.rate_per_s = 60.0
        await asyncio.sleep(traffic_s)
        assert (await world.counts())[A] == 3
        world.rate_per_s = left_per_s
        await asyncio.sleep(40)
        assert not world.records[-1].decision.shortfall
        await asyncio.sleep(20)
        assert world.records[-1].decision.expected.rate_per_s < 10
        await asyncio.sleep(100)
        assert await world.counts() == {A: 1}


@pytest.mark.virtual
async def test_a_queue_adds_workers_within_seconds():
    world = World({A: 1}, start_s=60, floor_period_s=60)
    async with running(world):
        world.rate_per_s = 1.0
        await asyncio.sleep(100)
        assert await world.counts() == {A: 1}
        world.queued = 3000
        await asyncio.sleep(5)
        assert (await world.counts())[A] > 1
        assert not world.records[-1].is_floor
        assert "3000 queued" in world.records[-1].explain()


@pytest.mark.virtual
async def test_roles_are_exchanged_before_workers_start():
    world = World({P: 1, D: 5}, cool_down_s=3600)
    world.rate_per_s = 40.0
    async with running(world):
        await asyncio.sleep(15)
        first = next(record for record in world.records if record.is_change)
        assert first.flips
        assert all(role is P for _, role in first.flips)
        assert not first.adds
        assert sum((await world.counts()).values()) == 6


@pytest.mark.virtual
async def test_an_slo_error_of_warm_workers_adds_and_one_of_cold_workers_waits():
    world = World({A: 2}, cold_s=30)
    world.rate_per_s, world.ttft_s = 10.0, 0.9
    async with running(world):
        await asyncio.sleep(29)
        assert world.records[-1].decision.expected.ttft_s is None
        await asyncio.sleep(10)
        assert any(record.decision.expected.ttft_s for record in world.records)
        assert (await world.counts())[A] == 4
        await asyncio.sleep(15)
        assert (await world.counts())[A] == 4, "what starts counts, and its latencies are not judged"


@pytest.mark.parametrize("replicas", [{A: 3}, {A: 1, P: 1, D: 0}])
@pytest.mark.virtual
async def test_without_frontends_nothing_changes(replicas):
    world = World(replicas, min_workers=1, cool_down_s=0)
    world.frontends = ()
    async with running(world):
        await asyncio.sleep(300)
        assert await world.counts() == replicas
        assert "nothing is known of the demand" in world.records[-1].explain()


@pytest.mark.virtual
async def test_a_dry_run_decides_and_changes_nothing():
    world = World({A: 1}, act={"dry_run": True})
    world.rate_per_s = 60.0
    async with running(world):
        await asyncio.sleep(120)
        assert await world.counts() == {A: 1}
        assert world.records[-1].adds[A] > 1
        assert world.records[-1].explain().startswith("would: ")


@pytest.mark.parametrize("error", [Unavailable("no supervisor answers"), ZeroDivisionError("a mistake")])
@pytest.mark.virtual
async def test_a_round_that_fails_is_tried_again(error):
    world = World({A: 1})
    answers = world.connector.scale

    async def nobody(after=None):
        raise error

    world.connector.scale = nobody
    async with running(world):
        await asyncio.sleep(100)
        world.connector.scale = answers
        await asyncio.sleep(60)
        assert world.records


@pytest.mark.slow
@pytest.mark.virtual
async def test_an_slo_out_of_reach_now_and_then_is_said_once_until_it_was_in_reach_for_a_cool_down():
    world = World({A: 1}, max_workers=2, cool_down_s=600, floor_period_s=10)
    world.rate_per_s = 1.0
    async with running(world):
        with structlog.testing.capture_logs() as said:
            for _ in range(8):
                world.input_tokens = 50_000
                await asyncio.sleep(400)
                world.input_tokens = 100
                await asyncio.sleep(400)
            shortfalls = [bool(record.decision.shortfall) for record in world.records if record.decision]
            assert sum(one != other for one, other in itertools.pairwise(shortfalls)) > 8
            assert _slo_events(said) == ["slo_out_of_reach"]
            await asyncio.sleep(1200)
            assert _slo_events(said) == ["slo_out_of_reach", "slo_in_reach"]


def _slo_events(said):
    return [entry["event"] for entry in said if entry["event"].startswith("slo_")]


@pytest.mark.virtual
async def test_room_bounds_both_roles_together():
    world = World({P: 1, D: 1}, workers_max=6, max_workers=16)
    world.rate_per_s = 200.0
    async with running(world):
        await asyncio.sleep(200)
        counts = await world.counts()
        assert sum(counts.values()) == 6
        assert min(counts.values()) >= 2
        assert "GPUs, there are 6" in world.records[-1].explain()


@pytest.mark.virtual
async def test_aggregated_workers_become_disaggregated_ones_where_these_are_clearly_fewer_and_back():
    # At 10 ms of ITL, 18 aggregated workers do as much as 5 prefill and 6 decode workers: long steps with prompts hurt.
    world = World(
        {A: 20, P: 0, D: 0}, cool_down_s=60, max_workers=32, slo=SloTargets(ttft_s=0.5, itl_s=0.010)
    )
    world.rate_per_s = 100.0
    async with running(world):
        await asyncio.sleep(900)
        counts = await world.counts()
        assert counts[A] == 0
        assert counts[P] + counts[D] <= 15
        switched = next(record for record in world.records if record.flips)
        assert not switched.adds
        world.rate_per_s = 1.0  # one aggregated worker does what a prefill and a decode worker do
        await asyncio.sleep(900)
        assert await world.counts() == {A: 1, P: 0, D: 0}


@pytest.mark.parametrize(
    ("replicas", "settings", "text"),
    [
        ({A: 1, P: 1}, {}, "aggregated, prefill: it scales aggregated workers"),
        ({A: 1}, {"roles": {"decode": {"max_workers": 3}}}, "roles.decode: there is no such role"),
        ({P: 1, D: 1}, {"budget": {"gpus": 1}}, "the budget is 1, one replica of each role costs 2"),
    ],
)
def test_roles_and_budgets_that_do_not_fit_are_refused(replicas, settings, text):
    with pytest.raises(ConfigError, match=text):
        World(replicas, **settings)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"roles": {"decode": {"min_workers": 9}}}, "min_workers of decode is 9 and max_workers 8"),
        ({"budget": {"gpus": 4, "usd_per_hour": 3.0}}, "one of gpus or usd_per_hour, got gpus, usd_per_hour"),
        ({"budget": {"usd_per_hour": float("nan")}}, "finite"),
        ({"cool_down_s": -1}, "must be >= 0"),
        ({"roles": {"decoder": {}}}, "decoder"),
        ({"max_worker": 2}, "did you mean 'max_workers'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, text):
    with pytest.raises(ConfigError, match=text):
        PlannerConfig.parse(settings, source="graph.yaml")


@pytest.mark.virtual
async def test_workers_stay_after_an_interval_that_was_not_seen_whole():
    """A supervisor that stood still hears afterwards of what arrived meanwhile; requests arrive as before."""

    class StoodStill(World):
        async def observe(self, seconds):
            whole_per_s = self.rate_per_s
            if seconds > 15.0:
                self.rate_per_s /= 100
            seen = await super().observe(seconds)
            self.rate_per_s = whole_per_s
            return seen

    world = StoodStill({A: 2}, cool_down_s=10.0, floor_period_s=10.0)
    world.rate_per_s = 40.0
    for _ in range(40):
        await world.planner.step()
        await asyncio.sleep(5.0)
    for seconds in (40.0, 5.0, 5.0, 5.0, 40.0, *[5.0] * 12):
        await asyncio.sleep(seconds)
        await world.planner.step()
    after = world.records[40:]
    assert {record.held for record in after} == {""}
    assert min(record.target[A] for record in after) >= world.needed(40.0)


@pytest.mark.parametrize(
    ("replicas", "started"),
    [({A: 0}, {A: 2}), ({P: 1, D: 0}, {P: 2, D: 2}), ({A: 0, P: 0, D: 1}, {A: 0, P: 2, D: 2})],
)
@pytest.mark.virtual
async def test_where_no_worker_could_answer_the_fewest_start_so_that_frontends_become_ready(
    replicas, started
):
    world = World(replicas, min_workers=2)
    world.frontends = ()
    async with running(world):
        await asyncio.sleep(60)
        assert await world.counts() == started
        assert "no worker could answer it, so the fewest start" in world.records[0].explain()
        await asyncio.sleep(60)
        assert await world.counts() == started
        assert not world.records[-1].is_change
