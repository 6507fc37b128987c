"""`penstock scale` on a running deployment: real processes, under load, and after the supervisor was killed."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import psutil
import pytest

from penstock.core.types.instances import Role
from penstock.core.types.scaling import ReplicaState
from penstock.deploy.control.deployments import find_deployment
from penstock.deploy.control.messages import SOCKET_NAME
from penstock.deploy.supervisor.local import LocalDeployment
from penstock.graph import Graph
from penstock.planner.act.actor import Actor
from tests.support.streams import TOKENS, Load

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("runtime_dir")]

TIMEOUT_S = 60.0


def graph_of(roles, **fields):
    return Graph.model_validate(
        {"model": "demo", "frontend": {"port": 0}, "roles": roles, "supervision": {"spare_processes": 0}}
        | fields
    )


def run(main):
    async def bounded():
        async with asyncio.timeout(TIMEOUT_S * 2):
            await main()

    asyncio.run(bounded())


async def until(pool, holds):
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


def test_no_request_fails_from_one_worker_to_three_and_back():
    """Streams finish or migrate, with every token as without scaling."""

    async def main():
        graph = graph_of({"aggregated": {"engine": "mock"}}, worker={"drain_timeout_s": 0.3})
        async with LocalDeployment(graph) as deployment:
            pool = deployment.pool
            async with Load(deployment.url, PROMPTS) as load:
                await load.more(12)
                await pool.add(Role.AGGREGATED, 2, by="test")
                await until(pool, lambda scale: all(r.state is ReplicaState.READY for r in scale.replicas))
                await load.more(36)
                await pool.retire(["worker-1", "worker-3"], by="test")
                await until(pool, lambda scale: [r.name for r in scale.replicas] == ["worker-2"])
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

    run(main)


def test_no_request_fails_through_flips():
    async def main():
        roles = {"prefill": {"engine": "mock"}, "decode": {"engine": "mock", "replicas": 2}}
        graph = graph_of(roles, worker={"drain_timeout_s": 0.3})
        async with LocalDeployment(graph) as deployment:
            pool = deployment.pool
            async with Load(deployment.url, PROMPTS) as load:
                await load.more(12)
                await pool.flip("decode-2", Role.PREFILL, by="test")
                assert len((await pool.scale()).of(Role.PREFILL)) == 2
                await load.more(12)
                await pool.flip("decode-2", Role.AGGREGATED, by="test")
                await load.more(12)
                await pool.flip("decode-2", Role.DECODE, by="test")
                await load.more(12)
            assert {prompt: len(texts) for prompt, texts in load.answers.items()} == dict.fromkeys(PROMPTS, 1)

    run(main)


def test_a_flipped_worker_that_dies_comes_back_in_its_new_role():
    async def main():
        roles = {"prefill": {"engine": "mock"}, "decode": {"engine": "mock", "replicas": 2}}
        async with LocalDeployment(graph_of(roles)) as deployment:
            await deployment.pool.flip("decode-2", Role.PREFILL, by="test")
            psutil.Process(deployment.pids()["decode-2"]).kill()
            await until(
                deployment.pool, lambda scale: any(r.state is ReplicaState.FAILED for r in scale.replicas)
            )
            await until(
                deployment.pool, lambda scale: all(r.state is ReplicaState.READY for r in scale.replicas)
            )
            async with aiohttp.ClientSession() as session:
                headers = {"Authorization": f"Bearer {deployment.admin_token}"}
                async with session.get(f"{deployment.url}/admin/workers", headers=headers) as response:
                    workers = (await response.json())["workers"]
            assert {worker["name"]: worker["role"] for worker in workers}["decode-2"] == "prefill"

    run(main)


def test_an_actor_takes_a_deployment_from_one_worker_to_four_and_back():
    """By the control channel, with flips between roles; a person's change is kept."""

    async def main():
        mock = {"engine": "mock"}
        graph = graph_of({"prefill": mock, "decode": mock}, worker={"drain_timeout_s": 0.3})
        async with LocalDeployment(graph) as deployment:
            connector = await find_deployment(url=deployment.url)
            actor = Actor(connector)
            async with Load(deployment.url, PROMPTS) as load:
                for target in ((1, 3), (2, 2), (3, 1), (1, 3), (1, 1)):
                    wanted = dict(zip((Role.PREFILL, Role.DECODE), target, strict=True))
                    outcome = await actor.carry_out(wanted)
                    assert not outcome.refused
                    assert not outcome.held
                    await until(
                        connector,
                        lambda scale: all(replica.state is ReplicaState.READY for replica in scale.replicas),
                    )
                    scale = await connector.scale()
                    assert {role: len(scale.of(role)) for role in wanted} == wanted
                    await load.more(12)
                assert all(len(texts) == 1 for texts in load.answers.values())
            assert (await asyncio.to_thread(scale_of, "decode", "2")).returncode == 0
            outcome = await actor.carry_out({Role.PREFILL: 1, Role.DECODE: 1})
            assert outcome.held.startswith("penstock scale has set 1 prefill, 2 decode")
            assert len((await connector.scale()).of(Role.DECODE)) == 2

    run(main)


class Serve:
    """`penstock serve --engine mock`, and `penstock scale` beside it."""

    def __init__(self):
        self.process = subprocess.Popen(
            [*COMMAND, "serve", "--engine", "mock", "--port", "0", "--set", "supervision.spare_processes=0"],
            stdout=subprocess.PIPE,
            text=True,
        )
        self.lines = []
        for line in self.process.stdout:
            self.lines.append(line)
            if re.search(r"^penstock +ready", line):
                break

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.communicate(timeout=TIMEOUT_S)

    def workers(self):
        return re.findall(r"^  (worker-\d+) +ready", scale_of().stdout, re.MULTILINE)


COMMAND = [sys.executable, "-m", "penstock"]


def scale_of(*arguments):
    return subprocess.run(
        [*COMMAND, "scale", *arguments], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


def test_the_command_and_what_it_refuses():
    done = scale_of()
    assert (done.returncode, done.stdout) == (1, "")
    assert "no deployment of this user runs on this host; start one with penstock serve" in done.stderr
    with Serve() as serve:
        assert serve.workers() == ["worker-1"]
        done = scale_of("aggregated", "2")
        assert done.returncode == 0
        assert re.search(r"1 -> 2, starts worker-2.*^worker-2 +ready$", done.stdout, re.MULTILINE | re.DOTALL)
        for arguments, code, why in (
            (["prefill", "1"], 2, "prefill is not of this deployment, which has aggregated"),
            (["aggregated", "0"], 1, "is the last worker that answers requests"),
            (["aggregated", "5000"], 1, "router.workers_max"),
            (["agregated", "1"], 2, "did you mean 'aggregated'"),
            (["aggregated", "-1"], 2, "N: must be a number of workers >= 0"),
            (["aggregated", "1", "--name", "other"], 1, "no deployment called other of this user"),
        ):
            done = scale_of(*arguments)
            assert done.returncode == code, done
            assert why in done.stderr
            assert done.stderr.count("\n") == 1
        assert serve.workers() == ["worker-1", "worker-2"]
        killed = subprocess.Popen([*COMMAND, "scale", "aggregated", "4"], stdout=subprocess.PIPE, text=True)
        assert "2 -> 4" in killed.stdout.readline()
        killed.kill()
        killed.communicate()
        end_s = time.monotonic() + TIMEOUT_S
        while len(serve.workers()) < 4 and time.monotonic() < end_s:
            time.sleep(0.1)
        done = scale_of("aggregated", "1")
        assert "stopped" in done.stdout
        assert serve.workers() == ["worker-1"] or len(serve.workers()) == 1


def test_half_written_and_foreign_messages_change_nothing():
    with Serve() as serve:
        (path,) = Path(os.environ["XDG_RUNTIME_DIR"]).glob(f"penstock-*/{SOCKET_NAME}")
        assert path.stat().st_mode & 0o077 == 0
        add = b'{"version":1,"body":{"type":"add","role":"aggregated","count":1,"by":"x"}}'
        for content, answer in (
            (add, b""),
            (add.replace(b":1,", b":9,", 1) + b"\n", b"version 1 of the control channel, got 9"),
            (b"GET / HTTP/1.1\r\n\r\n", b"no request of the control channel"),
            (b'{"version":1,"body":{"type":"burn"}}\n', b"no request of the control channel"),
            (b"\n", b"no request"),
        ):
            with socket.socket(socket.AF_UNIX) as caller:
                caller.connect(str(path))
                caller.sendall(content)
                caller.shutdown(socket.SHUT_WR)
                assert answer in caller.makefile("rb").read()
        assert serve.workers() == ["worker-1"]


def test_a_killed_supervisor_comes_back_with_its_scale():
    with Serve() as serve:
        assert scale_of("aggregated", "3").returncode == 0
        serve.process.send_signal(signal.SIGKILL)
        serve.process.wait(timeout=TIMEOUT_S)
        assert "no deployment" in scale_of("aggregated", "4").stderr
    with Serve() as serve:
        assert any("3 aggregated: set by penstock scale before the restart" in line for line in serve.lines)
        assert serve.workers() == ["worker-1", "worker-2", "worker-3"]
