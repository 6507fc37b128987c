"""Workers that die, hang or never start while a planner scales them: no request fails, and the log tells what happened."""

import asyncio
import os
import signal

import pytest

from penstock.core.types.instances import ReplicaState, Role
from penstock.deploy.supervisor.local import LocalDeployment
from penstock.graph import Graph
from tests.e2e.helpers.planned import command, run, until
from tests.support.streams import Load

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("runtime_dir")]

PROMPTS = [f"{number} times the same question" for number in range(12)]
A = Role.AGGREGATED
PLANNER = {"max_workers": 3, "react_period_s": 0.5, "floor_period_s": 2, "cold_s": 1}


def graph_of(*, planner=None, **fields):
    return Graph.model_validate(
        {
            "model": "demo",
            "frontend": {"port": 0},
            "roles": {"aggregated": {"engine": "mock", "max_running_requests": 2}},
            "slo": {"ttft_s": 0.2, "itl_s": 0.1},
            "planner": PLANNER | (planner or {}),
            "supervision": {"spare_processes": 0, "liveness_timeout_s": 12},
            "worker": {"drain_timeout_s": 0.3},
        }
        | fields
    )


def all_ready(scale, count):
    workers = scale.of(A)
    return len(workers) == count and all(each.state is ReplicaState.READY for each in workers)


def state(scale, name):
    return next((each.state for each in scale.replicas if each.name == name), None)


async def told(text, *, rounds=1000):
    """Wait until the last `rounds` of the planner's log say `text`; returns them."""
    while text not in (log := await asyncio.to_thread(command, "planner", "log", f"-n{rounds}", "--json")):  # noqa: ASYNC110
        await asyncio.sleep(0.2)  # the log is of another process
    return log


def test_a_worker_that_is_killed_or_hangs_comes_back_and_is_no_scale_in():
    async def main():
        async with LocalDeployment(graph_of()) as deployment:
            pool = deployment.pool
            async with Load(deployment.url, PROMPTS) as load:
                await until(pool, lambda scale: all_ready(scale, 3))
                revision = (await pool.scale()).revision
                os.kill(deployment.pids()["worker-2"], signal.SIGKILL)
                await until(pool, lambda scale: state(scale, "worker-2") is ReplicaState.FAILED)
                await until(pool, lambda scale: all_ready(scale, 3))
                hanging = deployment.pids()["worker-3"]
                os.kill(hanging, signal.SIGSTOP)
                await told('"silent":["worker-3"]')
                await until(pool, lambda scale: state(scale, "worker-3") is ReplicaState.FAILED)
                await until(pool, lambda scale: all_ready(scale, 3))
                await load.more(24)
                scale = await pool.scale()
                assert (scale.revision, len(scale.of(A))) == (revision, 3)
            assert all(len(texts) == 1 for texts in load.answers.values())
            assert "retires" not in await asyncio.to_thread(command, "planner", "log", "-n", "1000")

    run(main())


@pytest.mark.nightly
def test_a_worker_that_does_not_become_ready_is_replaced_after_the_deadline():
    """The deadline is the setting's, or three times a measured start if that is longer."""

    async def main():
        async with LocalDeployment(graph_of(planner={"act": {"start_deadline_s": 3}})) as deployment:
            pool = deployment.pool
            async with Load(deployment.url, PROMPTS) as load:
                scale = await until(pool, lambda scale: len(scale.of(A)) == 3)
                while "worker-3" not in deployment.pids():
                    scale = await pool.scale(scale.sequence)
                os.kill(deployment.pids()["worker-3"], signal.SIGSTOP)
                await told('"overdue":["worker-3"]')
                await until(pool, lambda scale: all_ready(scale, 3))
                await load.more(12)
            assert all(len(texts) == 1 for texts in load.answers.values())
            log = await asyncio.to_thread(command, "planner", "log", "-n", "1000")
            assert "1 aggregated more, worker-3 retires: worker-3 was not ready in time" in log

    run(main())
