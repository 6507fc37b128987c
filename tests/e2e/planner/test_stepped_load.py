"""`penstock serve` with a planner under a load that comes and goes: real processes, no request fails, tokens are exact."""

import asyncio
import re

import aiohttp
import pytest

from penstock.core.types.instances import Role
from penstock.deploy.control.local_connector import find_deployment
from tests.e2e.helpers.planned import command, planner_metrics, run, serving, until_ready
from tests.support.streams import Load

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("runtime_dir")]

PROMPTS = [f"{number} times the same question" for number in range(12)]
BOUNDS = ("--max-workers", "4", "--slo-ttft", "0.2", "--slo-itl", "0.1")
FEW = {"roles.aggregated.max_running_requests": 2}
"""Two requests at a time in each worker: twelve streams need more than four workers."""
MOCK = ("--engine", "mock", *BOUNDS)


async def step_up_and_down(url):
    """Run 12 streams at once until there are 4 workers, then one after another until there is 1."""
    connector = await find_deployment(url=url)
    async with Load(url, PROMPTS) as many:
        await until_ready(connector, {Role.AGGREGATED: 4})
        await many.more(24)
    async with Load(url, PROMPTS[:1], pause_s=0.5):
        await until_ready(connector, {Role.AGGREGATED: 1})
    alone = Load(url, PROMPTS)
    async with aiohttp.ClientSession() as session:
        for prompt in PROMPTS:  # no faster than before, or the planner rightly starts a worker
            await alone.stream(session, prompt)
            await asyncio.sleep(0.5)
    assert alone.answers == many.answers, "tokens are those of one calm worker"


def test_one_worker_to_four_and_back_in_one_life_of_a_planner():
    """The mock engine alone: whether one real engine holds the SLO depends on what else the machine does."""
    with serving(*MOCK, **FEW) as planned:
        run(step_up_and_down(planned.url))
        log = command("planner", "log", "-n", "1000")
        why = command("planner", "why", "aggregated")
        seen = planner_metrics(planned.url)
    added = re.findall(
        r"  changed  (\d) aggregated more: aggregated \d -> \d \(\d GPUs\) for [\d.]+ requests/s, \d+ queued",
        log,
    )
    retired = re.findall(r"worker-\d retires", log)
    assert sum(map(int, added)) == len(retired) >= 3  # more where others keep the machine busy
    assert re.search(r"did +retires worker-.*not fewer: one replica is the fewest", why, re.DOTALL)
    for change in ("add", "retire"):
        assert seen["penstock_planner_changes_total", change] == len(retired)
    assert seen["penstock_planner_workers", "aggregated"] == 1
    assert seen["penstock_planner_wanted_workers", "aggregated"] == 1
    assert seen["penstock_planner_forecast_high", "requests_per_s"] > 0
    assert seen["penstock_planner_rounds_total", "changed"] >= 2
    assert ("penstock_planner_rounds_total", "failed") not in seen
