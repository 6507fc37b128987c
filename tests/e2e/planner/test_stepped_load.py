"""`penstock serve` with a planner under a load that comes and goes: real processes, no request fails, tokens are exact."""

import asyncio
import contextlib
import re
import signal
import subprocess
import sys
import time

import pytest

from penstock.core.types.instances import Role
from penstock.core.types.scaling import ReplicaState
from penstock.deploy.control.deployments import find_deployment
from tests.support.streams import Load

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("runtime_dir")]

COMMAND = [sys.executable, "-m", "penstock"]
TIMEOUT_S = 150.0
PROMPTS = [f"{number} times the same question" for number in range(12)]
FAST = {
    "planner.react_period_s": 0.5,
    "planner.floor_period_s": 2,
    "planner.cool_down_s": 3,
    "planner.cold_s": 1,
    "planner.hold_s": 600,
    "supervision.spare_processes": 0,
    "worker.drain_timeout_s": 0.3,
}


@contextlib.contextmanager
def serving(*arguments, **settings):
    """Run `penstock serve`; yields (URL, process, lines so far)."""
    flags = [f"--set={name}={value}" for name, value in (FAST | settings).items()]
    process = subprocess.Popen(
        [*COMMAND, "serve", "--port", "0", *arguments, *flags], stdout=subprocess.PIPE, text=True
    )
    lines = []
    try:
        for line in process.stdout:
            lines.append(line)
            if re.search(r"^penstock +ready", line):
                break
        url = re.search(r"http://\S+", lines[-1])[0]
        yield url, process, lines
    finally:
        process.terminate()
        process.communicate(timeout=TIMEOUT_S)


async def counted(connector, holds):
    """Wait until the ready workers of each role satisfy `holds`."""
    scale = await connector.scale()
    while True:
        ready = {
            limit.role: sum(each.state is ReplicaState.READY for each in scale.of(limit.role))
            for limit in scale.limits
        }
        if holds(ready):
            return ready
        scale = await connector.scale(scale.sequence)


def run(main):
    async def bounded():
        async with asyncio.timeout(TIMEOUT_S):
            await main()

    asyncio.run(bounded())


def command(*arguments):
    done = subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


MOCK = ("--engine", "mock", "--max-workers", "4", "--slo-ttft", "0.2", "--slo-itl", "0.1")
FEW = {"roles.aggregated.max_running_requests": 2}
"""Two requests at a time in each worker: twelve streams need more than four workers."""


def test_one_worker_to_four_and_after_a_kill_back_to_one():
    async def load(url):
        connector = await find_deployment(url=url)
        async with Load(url, PROMPTS) as streams:
            await counted(connector, lambda ready: ready[Role.AGGREGATED] == 4)
            await streams.more(12)
        assert {prompt: len(texts) for prompt, texts in streams.answers.items()} == dict.fromkeys(PROMPTS, 1)

    async def idle(url):
        connector = await find_deployment(url=url)
        await counted(connector, lambda ready: ready[Role.AGGREGATED] == 1)

    with serving(*MOCK, **FEW) as (url, process, _):
        run(lambda: load(url))
        log = command("planner", "log", "-n", "1000")
        assert re.search(r"  changed  \d aggregated more: aggregated 1 -> ", log)
        assert "not fewer: " in command("planner", "why", "aggregated")
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=TIMEOUT_S)
        assert command("planner", "log", "--name", "default", "-n", "1000").startswith(log[:40])
    with serving(*MOCK, **FEW) as (url, _, lines):
        assert any("4 aggregated, as scaled before by planner" in line for line in lines)
        run(lambda: idle(url))
        assert re.search(r"did +retires worker-", command("planner", "why"))


def test_a_persons_change_stays_under_load():
    async def main(url):
        connector = await find_deployment(url=url)
        async with Load(url, PROMPTS) as streams:
            await counted(connector, lambda ready: ready[Role.AGGREGATED] == 4)
            await asyncio.to_thread(command, "scale", "aggregated", "1", "--no-wait")
            before = (await connector.scale()).revision
            await streams.more(48)
            scale = await connector.scale()
            assert (scale.revision, scale.changed_by) == (before, "penstock scale")
        assert all(len(texts) == 1 for texts in streams.answers.values())

    with serving(*MOCK, **FEW) as (url, *_):
        run(lambda: main(url))
        end_s = time.monotonic() + TIMEOUT_S
        while "penstock scale has set 1 aggregated" not in (log := command("planner", "log")):
            assert time.monotonic() < end_s, log
            time.sleep(0.2)
