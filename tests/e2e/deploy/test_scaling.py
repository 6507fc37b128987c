"""`penstock scale` on a running deployment: real processes, under load, and after the supervisor was killed."""

import asyncio
import re

import pytest

from penstock.core.types.instances import ReplicaState, Role
from penstock.deploy.supervisor.local import LocalDeployment
from penstock.graph import Graph
from tests.support.host import until
from tests.support.streams import TOKENS, Load
from tests.support.up import Up

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("runtime_dir")]

TIMEOUT_S = 240.0


def graph_of(roles, **fields):
    return Graph.model_validate(
        {"model": "demo", "frontend": {"port": 0}, "roles": roles, "supervision": {"spare_processes": 0}}
        | fields
    )


def run(main):
    async def bounded():
        async with asyncio.timeout(TIMEOUT_S):
            await main()

    asyncio.run(bounded())


async def until_scale(pool, holds):
    scale = await pool.scale()
    while not holds(scale):
        scale = await pool.scale(scale.sequence)
    return scale


async def observed(stream, worker):
    """Wait until only this worker is seen, with finished steps."""
    heard = asyncio.Event()
    stream.on_window = heard.set
    while True:
        seen = stream.observe(60.0)
        if [view.name for view in seen.workers if view.step_s.count] == [worker]:
            return seen
        heard.clear()
        await heard.wait()


PROMPTS = [f"{number} times the same question" for number in range(12)]


@pytest.mark.within(240)
async def test_no_request_fails_from_one_worker_to_three_and_back():
    """Streams finish or migrate, with every token as without scaling."""
    graph = graph_of({"aggregated": {"engine": "mock"}}, worker={"drain_timeout_s": 0.3})
    async with LocalDeployment(graph) as deployment:
        pool = deployment.pool
        async with Load(deployment.url, PROMPTS) as load:
            await load.more(12)
            await pool.add(Role.AGGREGATED, 2, by="test")
            await until_scale(pool, lambda scale: all(r.state is ReplicaState.READY for r in scale.replicas))
            await load.more(36)
            await pool.retire(["worker-1", "worker-3"], by="test")
            await until_scale(pool, lambda scale: [r.name for r in scale.replicas] == ["worker-2"])
            await load.more(12)
            seen = await observed(deployment.observations, "worker-2")
        assert set(deployment.pids()) == {"worker-2", "frontend-1"}
        assert seen.frontends == ("frontend-1",)
        assert [(worker.name, worker.role) for worker in seen.workers] == [("worker-2", Role.AGGREGATED)]
        assert seen.workers[0].step_s.count > 0
        assert seen.demand.arrivals_per_s > 0
        assert seen.demand.output_tokens.mean == TOKENS
        assert min(seen.demand.ttft_s.count, seen.demand.itl_s.count) > 0
        assert seen.demand.failed_per_s == 0
        assert {prompt: len(texts) for prompt, texts in load.answers.items()} == dict.fromkeys(PROMPTS, 1)


@pytest.fixture
def up(tmp_path, runtime_dir):
    made = Up(tmp_path, runtime_dir)
    made.graph()
    yield made
    made.end()


def ready_workers(up):
    return re.findall(r"^  (worker-\d+) +ready", up.run("scale").stdout, re.MULTILINE)


def test_the_command_what_it_refuses_and_a_supervisor_that_comes_back_with_its_scale(up):
    done = up.run("scale", check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "no deployment of this user runs on this host; start one with penstock serve" in done.stderr
    process = up.up("graph.yaml")
    assert ready_workers(up) == ["worker-1"]
    done = up.run("scale", "aggregated", "2")
    assert re.search(r"1 -> 2, starts worker-2.*^worker-2 +ready$", done.stdout, re.MULTILINE | re.DOTALL)
    for arguments, code, why in (
        (["prefill", "1"], 2, "prefill is not of this deployment, which has aggregated"),
        (["aggregated", "0"], 1, "is the last worker that answers requests"),
        (["aggregated", "5000"], 1, "router.workers_max"),
        (["aggregated", "-1"], 2, "N: must be a number of workers >= 0"),
        (["aggregated", "1", "--name", "other"], 1, "no deployment called other of this user"),
    ):
        done = up.run("scale", *arguments, check=False)
        assert done.returncode == code, done
        assert why in done.stderr
        assert done.stderr.count("\n") == 1
    assert ready_workers(up) == ["worker-1", "worker-2"]
    command = Up(up.folder, up.environment["XDG_RUNTIME_DIR"])
    scaling = command.start("scale", "aggregated", "4")
    command.wait("2 -> 4")
    scaling.kill()
    command.end()
    until(lambda: len(ready_workers(up)) == 4)
    process.kill()
    process.wait()
    assert "no deployment" in up.run("scale", "aggregated", "4", check=False).stderr
    up.up("graph.yaml")
    assert any("4 aggregated: set by penstock scale before the restart" in line for line in up.lines)
    assert "stopped" in up.run("scale", "aggregated", "1").stdout
    assert len(ready_workers(up)) == 1
