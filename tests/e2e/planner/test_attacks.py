"""Processes that are killed and stopped at any step of what a planner does: seeded."""

import asyncio

import pytest

from penstock.core.types.instances import ReplicaState, Role
from penstock.deploy.control.local_connector import find_deployment
from tests.e2e.helpers.planned import command, run, serving, until
from tests.e2e.planner.attack import Attack

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("runtime_dir")]

SECONDS = 12.0
READING = [f"{number} " + "a long text to read. " * 40 for number in range(4)], 2
WRITING = [f"{number} write a long text" for number in range(4)], 80
ROLE = {
    "max_running_requests": 4,
    "kv_blocks": 96,
    "mock.timing.prefill_s_per_token": 0.0008,
    "mock.kv_bytes_per_block": 128,  # the content of the KV that is transferred is checked
}
SETTINGS = {"planner.budget.gpus": 5, "planner.act.hold_s": 2, "frontend.processes": 2} | {
    f"roles.{role}.{name}": value for role in ("prefill", "decode") for name, value in ROLE.items()
}
FLAGS = [
    "--engine",
    "mock",
    "--prefill",
    "2",
    "--decode",
    "2",
    "--max-workers",
    "3",
    "--slo-ttft",
    "1",
    "--slo-itl",
    "1",
]


def is_whole(scale):
    """Tell whether all workers are ready again."""
    return all(each.state is ReplicaState.READY for each in scale.replicas) and all(
        scale.of(role) for role in (Role.PREFILL, Role.DECODE)
    )


def test_no_stream_is_lost_but_those_of_killed_frontends():
    async def attack(served):
        connector = await find_deployment(url=served.url)
        attack = Attack(served.url, served.process.pid, connector, seed=1)
        async with asyncio.TaskGroup() as group:
            for prompts, tokens in (READING, WRITING):
                group.create_task(attack.load(prompts, tokens))
            await attack.faults(SECONDS)
            await until(connector, is_whole)
            attack.ends = True
        print(attack.counts, attack.lost.done, attack.lost.excused)  # shown if the test fails
        assert attack.lost.told == []
        assert attack.lost.done > 20
        assert len(attack.counts) >= 4, "a few kinds of faults at least"
        assert attack.lost.excused == 0 or any(name.startswith("frontend") for name in attack.killed)
        assert all(len(texts) == 1 for texts in attack.answers.values()), "tokens are exact"

    with serving(*FLAGS, **SETTINGS) as served:
        run(attack(served))
        assert command("planner", "log", "-n", "5")
        served.process.poll()
        assert served.process.returncode is None, "the supervisor lives"
