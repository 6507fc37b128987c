"""A planner that turns prefill into decode workers and back as the mix of requests changes: real processes, tokens are exact."""

import re

import aiohttp
import pytest

from benchmarks.processes.served import served
from penstock.core.types.instances import Role
from penstock.deploy.control.deployments import find_deployment
from tests.e2e.helpers.planned import command, planner_metrics, run, serving, until_ready
from tests.support.streams import Load

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("runtime_dir")]

READING = [f"{number} " + "a long text to read. " * 60 for number in range(12)], 2
WRITING = [f"{number} write a long text" for number in range(12)], 300
"""Prompts and output tokens: the first keep prefill workers busy, the second decode workers."""
MIXES = ((READING, (3, 1)), (WRITING, (1, 3)), (READING, (3, 1)))
"""Mixes one after another, and the prefill and decode workers that each needs."""
BOUNDS = ("--max-workers", "3", "--slo-ttft", "2", "--slo-itl", "5")
"""The second of two tokens waits for the KV transfer, which is no lack of decode workers."""
SETTINGS = {
    "max_running_requests": 2,
    "kv_blocks": 96,  # no prompt is still there when it comes again
    "mock.timing.prefill_s_per_token": 0.0015,
    "mock.kv_bytes_per_block": 128,  # the content of the KV that is transferred is checked
}
ROLES = {f"roles.{role}.{name}": value for role in ("prefill", "decode") for name, value in SETTINGS.items()}


def test_workers_change_roles_with_the_mix_of_requests():
    answers = {}

    async def change_the_mix(url):
        connector = await find_deployment(url=url)
        for (prompts, tokens), (prefill, decode) in MIXES:
            async with Load(url, prompts, tokens=tokens, pause_s=2) as load:
                await until_ready(connector, {Role.PREFILL: prefill, Role.DECODE: decode})
                await load.more(12)
            for prompt, texts in load.answers.items():
                answers[prompt] = answers.get(prompt, set()) | texts

    async def compare(url):
        async with aiohttp.ClientSession() as session:
            for prompts, tokens in (READING, WRITING):
                load = Load(url, prompts, tokens=tokens)
                for prompt in prompts:
                    await load.stream(session, prompt)
                assert load.answers == {prompt: answers[prompt] for prompt in prompts}

    settings = ROLES | {"planner.budget.gpus": 4, "router.policy": "least-loaded"}
    with serving("--engine", "mock", "--prefill", "1", "--decode", "1", *BOUNDS, **settings) as planned:
        run(change_the_mix(planned.url))
        log = command("planner", "log", "-n", "1000")
        seen = planner_metrics(planned.url)
        assert len(re.findall(r"-\d becomes decode", log)) >= 2
        assert len(re.findall(r"-\d becomes prefill", log)) >= 1
        assert "not fewer: " in command("planner", "why", "decode")
        assert seen["penstock_planner_changes_total", "flip"] >= 3
        assert seen["penstock_planner_changes_total", "add"] >= 2
        assert seen["penstock_planner_workers", "prefill"] + seen["penstock_planner_workers", "decode"] <= 4
    with served("--engine", "mock", "--set=roles.aggregated.mock.speedup=100") as unscaled:
        run(compare(unscaled.url))
