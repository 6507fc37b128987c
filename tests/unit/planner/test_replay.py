"""Recorded rounds, decided again."""

import asyncio

import pytest

from penstock.core.types.instances import Role
from penstock.planner.config import PlannerConfig
from penstock.planner.decision_log import DecisionLog, LoggedRun, read_entries
from penstock.planner.demand import SloTargets
from penstock.planner.policy import Policy
from penstock.planner.replay import LogReplay
from penstock.sim.loop import run_virtual
from tests.support.planner_world import SLO, World

A, P, D = Role.AGGREGATED, Role.PREFILL, Role.DECODE
SETTINGS = {"cool_down_s": 120.0, "max_workers": 12}


@pytest.fixture(
    scope="module",
    params=[{A: 2}, {P: 1, D: 3}, {A: 2, P: 0, D: 0}],
    ids=["aggregated", "disaggregated", "either"],
)
def recorded(request, tmp_path_factory):
    """The world and the log of a planner whose demand rises, falls and rises."""
    path = tmp_path_factory.mktemp("recorded") / "planner.jsonl"

    async def main():
        world = World(request.param, **SETTINGS)
        log = DecisionLog(path, LoggedRun(time_s=0.0, version="1"))
        for rate_per_s, queued in ((5.0, 0), (60.0, 40), (60.0, 0), (8.0, 0), (30.0, 0)):
            world.rate_per_s, world.queued = rate_per_s, queued
            for _ in range(60):
                log.put(await world.planner.step())
                await asyncio.sleep(5.0)
        log.close()
        assert any(each.is_change for each in world.records)
        return world

    return run_virtual(main()), path


def replayed(world, entries, slo=SLO, **settings):
    config = PlannerConfig(**SETTINGS | settings)
    again = LogReplay(
        lambda _run: Policy(config, slo, world.capacities), cool_down_s=lambda _run: config.cool_down_s
    )
    return again, list(again.run(entries))


@pytest.mark.slow
def test_equal_settings_decide_the_same(recorded):
    world, path = recorded
    again, found = replayed(world, read_entries(path))
    assert len(found) > 20
    assert [each.round.record.number for each in found if each.differs] == []
    assert again.recorded_s == again.replayed_s
    assert sum(again.recorded_s.values()) > 0


def test_rounds_that_leave_the_workers_to_somebody_else_stay_so(tmp_path):
    path = tmp_path / "planner.jsonl"

    async def main():
        world = World({A: 2}, **SETTINGS, act={"hold_s": 30.0})
        world.rate_per_s = 60.0
        log = DecisionLog(path, LoggedRun(time_s=0.0, version="1"))
        for number in range(24):
            if number == 6:
                names = [replica.name for replica in (await world.connector.scale()).replicas]
                await world.connector.retire(names[1:], by="a person")
            log.put(await world.planner.step())
            await asyncio.sleep(5.0)
        log.close()
        return world

    _, found = replayed(run_virtual(main()), read_entries(path))
    held = [each for each in found if each.round.record.held]
    assert any(each.wanted != each.target for each in held)
    assert [each.round.record.number for each in found if each.differs] == []


def test_other_settings_decide_otherwise(recorded):
    world, path = recorded
    _, found = replayed(world, read_entries(path), slo=SloTargets(ttft_s=0.2, itl_s=0.0105))
    assert any(
        each.differs and sum(each.wanted.values()) > sum(each.round.record.decision.target.values())
        for each in found
    )
    _, found = replayed(world, read_entries(path), max_workers=3)
    assert any(each.differs for each in found)
    assert all(count <= 3 for each in found for count in each.target.values())


def test_a_log_whose_beginning_is_gone_is_compared_after_a_cool_down(recorded):
    world, path = recorded
    _, *entries = read_entries(path)
    late = [LoggedRun(time_s=0.0, version="1", continues=True), *entries[len(entries) // 2 :]]
    again, found = replayed(world, late)
    assert not any(each.differs for each in found)
    assert any(each.is_compared for each in found)
    assert not found[0].is_compared
    again, found = replayed(world, entries)
    assert (found, again.skipped) == ([], len(entries))
