"""Workers that die, hang or never start while a planner scales them: no request fails, and the log tells what happened."""

import asyncio
import contextlib
import json
import os
import re
import signal

import pytest

from penstock.core.types.instances import Role
from penstock.core.types.scaling import ReplicaState
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


async def kill_those_that_start(deployment):
    """Let no start succeed, for ever."""
    pool, pending = deployment.pool, {ReplicaState.STARTING, ReplicaState.FAILED}
    while True:
        scale, pids = await pool.scale(), deployment.pids()
        for each in scale.replicas:
            if each.state in pending and each.name in pids:
                with contextlib.suppress(ProcessLookupError):  # it has been killed a moment ago
                    os.kill(pids[each.name], signal.SIGKILL)
        await asyncio.sleep(0.05)


def test_starts_that_keep_failing_are_tried_later_each_time_until_one_succeeds():
    async def main():
        planner = {"max_workers": 2, "act": {"start_deadline_s": 3}}
        async with LocalDeployment(graph_of(planner=planner)) as deployment:
            deployment.pool._start_s[A] = 1.0  # the deadline is 3 s, also on a busy machine
            killing = asyncio.create_task(kill_those_that_start(deployment))
            async with Load(deployment.url, PROMPTS) as load:
                log = await told("as 3 starts in a row were not done in time")
                killing.cancel()
                deployment.pool._start_s[A] = 60.0  # a start that is not killed is in time there
                await until(deployment.pool, lambda scale: all_ready(scale, 2))
                await load.more(12)
            assert all(len(texts) == 1 for texts in load.answers.values())
            assert re.search(r"aggregated: 1 more wanted, tried again in [23] s, as 2 starts in a row", log)
            assert re.search(r"aggregated: 1 more wanted, tried again in [56] s, as 3 starts in a row", log)
            number = next(
                json.loads(line)["record"]["number"] for line in log.splitlines() if "as 3 starts" in line
            )
            why = await asyncio.to_thread(command, "planner", "why", str(number))
            assert "waits     aggregated: 1 more wanted, tried again in" in why

    run(main())


def test_a_persons_change_stays_under_load_also_where_the_worker_dies_that_drains():
    async def main():
        async with LocalDeployment(graph_of(worker={"drain_timeout_s": 30})) as deployment:
            pool = deployment.pool
            async with Load(deployment.url, PROMPTS, tokens=400) as load:
                await until(pool, lambda scale: all_ready(scale, 3))
                await load.more(1)
                await asyncio.to_thread(command, "scale", "aggregated", "2", "--no-wait")
                scale = await pool.scale()
                (leaving,) = [each.name for each in scale.replicas if each.state is ReplicaState.DRAINING]
                os.kill(deployment.pids()[leaving], signal.SIGKILL)
                await until(pool, lambda scale: state(scale, leaving) is None)
                await load.more(16)
                later = await pool.scale()
                assert (later.revision, later.changed_by) == (scale.revision, "penstock scale")
                assert all_ready(later, 2)
            assert all(len(texts) == 1 for texts in load.answers.values())
            await told("penstock scale has set 2 aggregated")

    run(main())
