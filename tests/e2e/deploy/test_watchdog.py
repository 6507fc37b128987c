"""Processes that hang, a supervisor that is stopped, and one that is killed while its workers have processes of their own."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from penstock.deploy.supervisor.child import GroupGuard
from tests.support.given_by import given_by

pytestmark = pytest.mark.slow

_SUPERVISOR = """
import asyncio, json
from penstock.deploy.supervisor.local import LocalDeployment
from penstock.graph import Graph

graph = Graph.model_validate({
    "model": "demo", "frontend": {"port": 0}, "supervision": {"liveness_timeout_s": 1.0, "spare_processes": 0},
    "roles": {"aggregated": {"engine": "mock"}},
})

async def main():
    async with LocalDeployment(graph) as deployment:
        print(json.dumps(deployment.pids()), flush=True)
        while True:
            await asyncio.sleep(0.05)
            print(json.dumps(deployment.pids()), flush=True)

asyncio.run(main())
"""
_HAS_CHILDREN = """
import subprocess, sys
if sys.argv[:1] == ["-m"] and "penstock.deploy.processes.process" in sys.orig_argv:
    subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
"""


@pytest.fixture
def supervisor(runtime_dir, tmp_path):
    """A supervisor in a process of its own, whose children each start a process that knows nothing of them."""
    (tmp_path / "sitecustomize.py").write_text(_HAS_CHILDREN, encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, "-c", _SUPERVISOR],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    yield process
    process.kill()
    process.communicate()
    for path in runtime_dir.glob("penstock-*"):  # what the next start would remove
        for inside in path.iterdir():
            inside.unlink()
        path.rmdir()


def pids_of(process):
    while not (line := process.stdout.readline()).startswith("{"):
        assert line, "the supervisor ended"
    return json.loads(line)


def started_by(pids):
    """Give the processes that the children of the deployment have started."""
    return [child for pid in pids.values() for child in psutil.Process(pid).children()]


def all_gone(processes, timeout_s=60.0):
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    return not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


async def is_answered(url):
    """Open a new connection, and see whether a frontend answers on it."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    answer = await reader.readline()
    writer.close()
    return answer.startswith(b"HTTP/1.1 200")


@given_by("deploy", workers=2, frontends=2, supervision={"liveness_timeout_s": 2.0, "spare_processes": 0})
async def test_what_hangs_is_killed_and_started_again_while_streams_go_on(site):
    expected, _ = await site.tell("hi", max_tokens=300)
    before = site.deployment.pids()
    busy = asyncio.ensure_future(site.tell("hi", max_tokens=1000))
    running = []

    async def runs():
        workers = (await site.workers()).items()
        running[:] = [name for name, each in workers if (each["load"] or {}).get("running_requests")]
        return running

    await site.until(runs)
    (worker,) = running
    os.kill(before[worker], signal.SIGSTOP)
    text, _ = await busy
    assert text.startswith(expected), "its stream went on elsewhere"
    os.kill(before["frontend-2"], signal.SIGSTOP)
    killed = {worker, "frontend-2"}

    async def all_ready():
        said = "failed killed after 2 s of silence (supervision.liveness_timeout_s); starts again in 0.2 s"
        again = [line for line in site.said if line.startswith("frontend-2 ready")]
        return all(f"{name} {said}" in site.said for name in killed) and len(again) == 2

    await site.until(all_ready)
    now = site.deployment.pids()
    assert {name for name, pid in now.items() if pid != before[name]} == killed
    assert all([await is_answered(site.url) for _ in range(50)]), "new connections reach who lives"
    counted = {
        f'penstock_deploy_process_failures_total{{process="{name}",reason="silent"}} 1.0' for name in killed
    }

    async def is_counted():
        async with site.http.get(f"{site.url}/metrics") as response:
            return counted <= set((await response.text()).splitlines())

    await site.until(is_counted)


def test_a_supervisor_that_was_stopped_blames_nobody_and_takes_along_what_its_workers_have_started(
    supervisor,
):
    before = pids_of(supervisor)
    os.kill(supervisor.pid, signal.SIGSTOP)
    time.sleep(2.5)
    os.kill(supervisor.pid, signal.SIGCONT)
    for _ in range(30):  # 1.5 s
        assert pids_of(supervisor) == before

    (started,) = psutil.Process(before["worker-1"]).children()
    os.kill(before["worker-1"], signal.SIGSTOP)
    while (now := pids_of(supervisor)).keys() != before.keys() or now["worker-1"] == before["worker-1"]:
        pass
    assert all_gone([started])

    guards = [child for child in psutil.Process(supervisor.pid).children() if child.pid not in now.values()]
    left = [*started_by(now), *guards, *map(psutil.Process, now.values())]
    assert len(left) == 5
    supervisor.kill()
    assert all_gone(left)


async def test_a_guard_that_is_killed_is_replaced_and_knows_all_groups():
    async with GroupGuard() as guard:
        group = await asyncio.create_subprocess_exec("sleep", "600", start_new_session=True)
        guard.add(group.pid)
        first = guard.pid
        os.kill(first, signal.SIGKILL)
        async with asyncio.timeout(60):
            while guard.pid in (first, None):  # noqa: ASYNC110 - what is waited for is another process
                await asyncio.sleep(0.01)
        assert group.returncode is None
    async with asyncio.timeout(60):
        assert await group.wait() == -signal.SIGKILL, "whoever leaves without a word about it"
