"""`penstock ps`, `logs` and `down` on deployments that run, hang and were killed."""

import asyncio
import os
import signal

import aiohttp
import psutil
import pytest

from tests.support.host import until
from tests.support.registries import free_port
from tests.support.streams import Load
from tests.support.up import TIMEOUT_S, Up

pytestmark = pytest.mark.slow
PROMPT = "one question"


@pytest.fixture
def up(tmp_path, runtime_dir):
    made = Up(tmp_path, runtime_dir)
    yield made
    made.end()


def running(pids):
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]


def test_a_deployment_is_listed_logged_and_ended_while_a_stream_finishes(up):
    graph = up.graph(
        name="blue", roles={"aggregated": {"engine": "mock", "replicas": 2, "mock": {"speedup": 0.5}}}
    )
    process = up.up(graph)
    (listed,) = up.ps()
    assert (listed["name"], listed["state"], listed["graph"]) == ("blue", "running", str(graph))
    assert (listed["url"], listed["pid"]) == (up.url, process.pid)
    names = {each["name"]: each for each in listed["processes"]}
    assert set(names) == {"frontend-1", "worker-1", "worker-2"}
    assert all(each["state"] == "ready" for each in names.values())
    assert psutil.Process(process.pid).children()
    assert "worker-1     ready     aggregated" in up.run("ps").stdout
    assert "worker-2    ready     mock" in up.run("logs", "worker-2").stdout
    assert "worker-1" not in up.run("logs", "worker-2").stdout
    refused = up.run("logs", "worker-3", check=False)
    assert (refused.returncode, refused.stderr) == (
        2,
        "penstock: PROCESS: 'worker-3' has printed nothing; did you mean 'worker-2'?\n",
    )
    follower = Up(up.folder, up.environment["XDG_RUNTIME_DIR"])
    follower.start("logs", "--follow", "--name", "blue")
    follower.wait("worker-1    ready")

    async def stream_through_down():
        load = Load(up.url, [PROMPT], tokens=150)
        async with aiohttp.ClientSession() as session:
            streaming = asyncio.create_task(load.stream(session, PROMPT))
            while not await runs(session, up):  # noqa: ASYNC110 - the state is in other processes
                await asyncio.sleep(0.02)
            down = await asyncio.to_thread(up.run, "down", graph)
            await streaming
        assert "stopped" in down.stdout
        assert load.answers[PROMPT]

    asyncio.run(stream_through_down())
    assert process.wait(timeout=TIMEOUT_S) == 0
    follower.wait("worker-1    stopped")
    follower.end()
    assert up.ps() == []
    assert "worker-2    stopped" in up.run("logs", "--name", "blue", "-n", "10").stdout, "kept after its end"
    gone = up.run("down", check=False)
    assert (gone.returncode, gone.stderr) == (1, "penstock: no deployment of this user runs on this host\n")


async def runs(session, up):
    """Tell whether a worker has a request."""
    token = (up.folder / "state" / "admin_token").read_text().strip()
    headers = {"Authorization": f"Bearer {token}"}
    async with session.get(f"{up.url}/admin/workers", headers=headers) as response:
        workers = (await response.json())["workers"]
    return any((worker["load"] or {}).get("running_requests") for worker in workers)


def test_of_two_deployments_the_named_one_ends_and_a_kill_leaves_nothing(up):
    blue = up.up(up.graph("blue.yaml", name="blue"))
    other = Up(up.folder, up.environment["XDG_RUNTIME_DIR"])
    green = other.up(other.graph("green.yaml", name="green"))
    try:
        assert {each["name"]: each["state"] for each in up.ps()} == dict.fromkeys(
            ("blue", "green"), "running"
        )
        refused = up.run("down", check=False)
        assert refused.returncode == 2
        assert f"2 deployments fit: blue at {up.url} of" in refused.stderr
        up.run("down", "--name", "green", "--now")
        assert green.wait(timeout=TIMEOUT_S) == 0
        (listed,) = up.ps()
        pids = [each["pid"] for each in listed["processes"]]
        guard = [child.pid for child in psutil.Process(blue.pid).children() if child.pid not in pids]
        blue.kill()
        blue.wait()
        until(lambda: not running(pids + guard))
        (listed,) = up.ps()
        assert (listed["name"], listed["state"]) == ("blue", "killed")
        assert "penstock down removes" in up.run("ps").stdout
        assert "was killed before" in up.run("down").stdout
        assert up.ps() == []
    finally:
        other.end()


def test_what_outlived_its_killed_supervisor_and_guard_is_ended(up):
    """An engine's process in its worker's group, while nobody is left to kill the group."""
    process = up.up(up.graph())
    (listed,) = up.ps()
    worker = next(each["pid"] for each in listed["processes"] if each["name"] == "worker-1")
    kept = {each["pid"] for each in listed["processes"]}
    (guard,) = (child.pid for child in psutil.Process(process.pid).children() if child.pid not in kept)
    engine = up.start_in_group(worker)
    process.send_signal(signal.SIGSTOP)  # it would start another guard
    os.kill(guard, signal.SIGKILL)
    process.kill()
    process.wait()
    until(lambda: not running([worker, guard]))
    assert engine.poll() is None
    (listed,) = up.ps()
    assert (listed["state"], listed["left"]) == ("killed", 1)
    assert "ended 1 process group that it had left" in up.run("down").stdout
    assert engine.wait(timeout=TIMEOUT_S) == -signal.SIGKILL


def test_a_supervisor_that_hangs_is_said_to_be_silent_and_killed_in_time(up):
    process = up.up(up.graph())
    (listed,) = up.ps()
    pids = [each["pid"] for each in listed["processes"]]
    process.send_signal(signal.SIGSTOP)
    (listed,) = up.ps()
    assert listed["state"] == "silent"
    down = up.run("down", "--timeout", "0.5")
    assert "killed    as it did not end" in down.stdout
    assert process.wait(timeout=TIMEOUT_S) == -signal.SIGKILL
    until(lambda: not running(pids))
    assert up.ps() == []


def test_parts_of_one_deployment_on_one_host_are_told_apart(up):
    """As where one host runs two parts of a graph: both have its name, its file and its directory."""
    hub = f"tcp://127.0.0.1:{free_port()}"
    up.environment["PENSTOCK_SECRET"] = "a secret of both parts, long enough"
    graph = up.graph(name="chat", runtime={"hub": hub})
    whole = up.up(graph)
    other = Up(up.folder, up.environment["XDG_RUNTIME_DIR"])
    other.environment |= {"PENSTOCK_SECRET": up.environment["PENSTOCK_SECRET"], "PENSTOCK_HOST": "second"}
    part = other.up(graph, "--join", hub, "--run", "aggregated")
    try:
        for command in (["scale"], ["logs"], ["down"], ["apply", graph]):
            refused = up.run(*command, "--name", "chat", check=False)
            assert refused.returncode == 2
            assert f"--part all, or {whole.pid}" in refused.stderr
            assert f"--part aggregated, or {part.pid}" in refused.stderr
        up.run("scale", "aggregated", "2", "--part", "aggregated")
        assert "worker-2    ready" in up.run("logs", "worker-2", "--part", str(part.pid)).stdout
        assert up.run("logs", "worker-2", "--part", "all", check=False).returncode == 2, "it has one worker"
        assert "nothing differs" in up.run("apply", graph, "--part", "all").stdout
        up.run("down", "--name", "chat", "--part", "aggregated")
        assert part.wait(timeout=TIMEOUT_S) == 0
        assert [each["pid"] for each in up.ps()] == [whole.pid]
    finally:
        other.end()
