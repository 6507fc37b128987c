"""A worker that fails is replaced by a process that has imported everything already."""

import os
import signal

import psutil
import pytest

pytestmark = pytest.mark.slow

ROUTABLE_S_MAX = 10.0
"""From a worker's end to requests for its successor: 2 to 4 s, and more on a busy machine."""


def spares(site):
    """Give the deployment's processes that wait to be workers."""
    used = set(site.deployment.pids().values())
    children = psutil.Process().children()
    return [c for c in children if c.pid not in used and "penstock.deploy.processes.process" in c.cmdline()]


def test_a_spare_takes_the_place_of_a_worker_and_another_one_follows(deploy):
    async def scenario(site):
        async def is_spare():
            return len(spares(site)) == 1

        async def is_replaced():
            return site.deployment.pids().get("worker-1", failed) != failed

        async def is_back():
            return (await site.workers()).get("worker-1", {}).get("pid") == site.deployment.pids().get(
                "worker-1"
            )

        failed = site.deployment.pids()["worker-1"]
        await site.until(is_spare)
        (spare,) = spares(site)
        site.kill("worker-1")
        await site.until(is_replaced)
        assert site.deployment.pids()["worker-1"] == spare.pid
        await site.until(is_back)
        assert len((await site.tell("hi", max_tokens=3))[0]) > 0

        await site.until(
            is_spare
        )  # another one follows; should it end by itself, the next start does without
        os.kill(spares(site)[0].pid, signal.SIGKILL)
        failed = spare.pid
        site.kill("worker-1")
        await site.until(is_replaced)
        await site.until(is_back)
        await site.until(is_spare)

    deploy(scenario, supervision={"spare_processes": 1})


@pytest.mark.engine
def test_a_worker_of_the_demo_model_is_routable_again_soon(deploy):
    async def scenario(site):
        async def is_spare():
            return len(spares(site)) == 1

        async def is_routable():
            worker = (await site.workers()).get("worker-1", {})
            return (
                worker.get("pid") == site.deployment.pids().get("worker-1") != failed
                and worker["condition"] == "ready"
            )

        failed = site.deployment.pids()["worker-1"]
        await site.until(is_spare)
        site.kill("worker-1")
        took_s = await site.until(is_routable)
        print(f"routable again {took_s:.1f} s after its end")
        assert took_s < ROUTABLE_S_MAX
        assert len((await site.tell("What is Penstock?", max_tokens=3))[0]) > 0

    deploy(
        scenario,
        role={"engine": "paged", "kv_blocks": 1024},
        supervision={"spare_processes": 1},
        timeout_s=120,
    )
