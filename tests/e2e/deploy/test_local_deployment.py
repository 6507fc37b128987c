"""`LocalDeployment` as a library: what its context promises."""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from penstock.core.errors import ConfigError
from penstock.demo import MODEL_DIR
from penstock.deploy.supervisor.local import LocalDeployment
from penstock.graph import Graph

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("runtime_dir")]


def graph_of(**fields):
    role = {"engine": "mock"} | fields.pop("role", {})
    supervision = {"spare_processes": 0} | fields.pop("supervision", {})
    return Graph.model_validate(
        {"model": "demo", "frontend": {"port": 0}, "roles": {"aggregated": role}, "supervision": supervision}
        | fields
    )


def run(main):
    async def bounded():
        async with asyncio.timeout(240):
            await main()

    asyncio.run(bounded())


def test_an_error_in_the_body_ends_everything_at_once():
    processes = []

    async def serve():
        async with LocalDeployment(graph_of(role={"replicas": 2})) as deployment:
            assert set(deployment.pids()) == {"worker-1", "worker-2", "frontend-1"}
            processes.extend(psutil.Process(pid) for pid in deployment.pids().values())
            raise KeyError("a mistake in the body")

    with pytest.raises(KeyError, match="a mistake in the body"):
        run(serve)
    assert not any(process.is_running() for process in processes)


@pytest.mark.within(240)
async def test_a_cancelled_body_ends_everything():
    entered = asyncio.Event()

    async def serve():
        async with LocalDeployment(graph_of()):
            entered.set()
            await asyncio.sleep(60)

    async with asyncio.TaskGroup() as group:
        serving = group.create_task(serve())
        await entered.wait()
        serving.cancel()
    assert serving.cancelled()


def test_a_deployment_that_fails_for_good_cancels_the_body_and_says_why(tmp_path):
    model = shutil.copytree(MODEL_DIR, tmp_path / "model")

    async def serve():
        async with LocalDeployment(graph_of(model=str(model))) as deployment:
            (model / "config.json").unlink()
            os.kill(deployment.pids()["worker-1"], signal.SIGKILL)
            await asyncio.sleep(60)

    with pytest.raises(ConfigError, match=r"no config\.json"):
        run(serve)


@pytest.mark.within(240)
async def test_cores_of_decode_workers_are_for_them_alone():
    cores = sorted(os.sched_getaffinity(0))
    assert len(cores) > 1, "needs two cores"

    def threads_of(pid):
        """Say where each thread may run, the first one first."""
        threads = [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()]
        threads.sort(key=lambda thread: (thread != pid, thread))  # numbers start anew at some point
        return [sorted(os.sched_getaffinity(thread)) for thread in threads]

    graph = graph_of(model=str(MODEL_DIR), roles={"prefill": {}, "decode": {}}, worker={"own_cores": True})
    async with LocalDeployment(graph) as deployment:
        for _ in range(2):
            others = [core for core in cores if core != cores[1]]
            pids = deployment.pids()
            assert {*map(tuple, threads_of(pids["frontend-1"]))} == {tuple(others)}
            main, *rest = threads_of(pids["prefill-1"])
            assert main == others
            assert [cores[0]] in rest
            main, *rest = threads_of(pids["decode-1"])
            assert main == cores
            assert [cores[1]] in rest
            os.kill(pids["frontend-1"], signal.SIGKILL)  # the next one is kept off as well
            await until(lambda before=pids: deployment.pids().get("frontend-1") != before["frontend-1"])
            member = next(member for member in deployment.members if member.name == "frontend-1")
            await member.ready.wait()


async def until(holds):
    while not holds():  # noqa: ASYNC110 - what is waited for is in other processes
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("said", [b"", b'{"name": "work'])
def test_a_process_whose_supervisor_dies_before_it_has_said_what_to_do_ends_without_a_word(said):
    ours, theirs = socket.socketpair()
    with theirs:
        with ours:
            ours.sendall(said)
        ended = subprocess.run(
            [sys.executable, "-P", "-m", "penstock.deploy.processes.process", str(theirs.fileno()), "test"],
            pass_fds=(theirs.fileno(),),
            capture_output=True,
            timeout=60,
            check=False,
        )
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, b"", b"")
