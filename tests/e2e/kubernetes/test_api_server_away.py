"""An API server that is away for a minute, hangs, refuses or forgets a token: what runs goes on, and the operator goes on with it afterwards."""

import asyncio
import random

import pytest

from tests.e2e.kubernetes.test_streams import PROMPTS, running
from tests.support.coroutines import given_by
from tests.support.kubernetes.faults import Faults

pytestmark = pytest.mark.slow
AWAY_S = 60.0
"""Longer than every lease: 15 s of the operator and of workers."""
NEW = "r/penstock:2"


def restarts(here):
    """Give each pod's uid and how often its container was started again."""
    return {
        pod["metadata"]["uid"]: [each["restartCount"] for each in pod["status"]["containerStatuses"]]
        for pod in here.cluster.pods()
    }


async def is_new(here):
    pods = here.cluster.pods()
    return {pod["spec"]["containers"][0]["image"] for pod in pods} == {NEW}


@given_by("site", operator=False, timeout_s=400)
async def test_a_minute_without_the_api_server_stops_restarts_and_loses_nothing(here, tmp_path):
    async with running(here, tmp_path) as load:
        before, loop = restarts(here), asyncio.get_running_loop()
        await here.server.stop()
        back_s = loop.time() + AWAY_S
        while loop.time() < back_s:
            await load.more(len(PROMPTS))
        assert restarts(here) == before, "while it was away"
        await here.server.start()
        await here.serves()
        assert restarts(here) == before
        await here.scale(
            "chat-aggregated", 3
        )  # the operator acts again, and new workers find their deployment
        await here.until(lambda: len(here.cluster.pods("aggregated")) == 3)
        await here.serves()
        assert restarts(here).items() >= before.items()


@pytest.mark.parametrize("trouble", ["hangs", "forgets the token"])
@given_by("site", timeout_s=120)
async def test_a_roll_out_waits_for_an_api_server_that(here, trouble):
    """Watches are silent, and calls have no answer or 401, for many lease times of this operator."""
    await here.apply()
    await here.serves()
    pods = {pod["metadata"]["name"] for pod in here.cluster.pods()}
    if trouble == "hangs":
        here.server.pause()
    else:
        here.server.tokens.discard("operator-token")
    changing = here.group.create_task(here.apply(options={"image": NEW}))
    await asyncio.sleep(5)
    assert {pod["metadata"]["name"] for pod in here.cluster.pods()} >= pods, "nothing is taken away"
    if trouble == "hangs":
        here.server.resume()
    else:
        here.server.tokens.add("operator-token")
    await changing
    await here.until(lambda: is_new(here))
    await here.serves()


@given_by("site", timeout_s=120)
async def test_an_api_server_that_refuses_slowly_delays_a_roll_out_and_breaks_nothing(here):
    await here.apply()
    await here.serves()
    await here.apply(options={"image": NEW})
    here.server.faults = Faults(random.Random(1), too_many=0.3, retry_after_s=1, unavailable=0.3, slow_s=0.3)
    await here.until(lambda: here.server.faults.count > 20)
    assert len(here.cluster.pods("decode")) >= 2
    here.server.faults = Faults()
    await here.until(lambda: is_new(here))
    await here.serves()
