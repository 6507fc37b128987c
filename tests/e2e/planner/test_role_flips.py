"""A planner that turns prefill into decode workers and back as the mix of requests changes: real processes, tokens are exact."""

import re

import pytest

from penstock.core.types.instances import Role
from penstock.deploy.control.local_connector import find_deployment
from tests.e2e.helpers.planned import command, planner_metrics, run, serving, until_ready
from tests.support.streams import Load

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("runtime_dir")]

READING = [f"{number} " + "a long text to read. " * 150 for number in range(8)], 2
WRITING = [f"{number} write a long text" for number in range(6)], 300
"""Prompts and output tokens: the first keep prefill workers busy, the second decode workers."""
MIXES = ((READING, (2, 1)), (WRITING, (1, 2)))
"""Mixes one after another, and the prefill and decode workers that each needs; three fit the budget."""
START = ("--prefill", "1", "--decode", "2", "--max-workers", "2", "--slo-itl", "5")
"""The second of two tokens waits for the KV transfer, which is no lack of decode workers."""
MOCK = {
    "engine": "mock",
    "max_running_requests": 2,
    "kv_blocks": 200,  # few prompts are still there when they come again
    "mock.timing.prefill_s_per_token": 0.0006,
    "mock.kv_bytes_per_block": 128,  # the content of the KV that is transferred is checked
}
PAGED = {
    "engine": "paged",
    "max_running_requests": 2,
    "kv_blocks": 200,
    "weight_dtype": "float32",  # cached prefixes change the rounding of smaller types
    "replicas_max": 3,  # also on a machine with fewer cores
}


def in_both_roles(settings):
    return {
        f"roles.{role}.{name}": value for role in ("prefill", "decode") for name, value in settings.items()
    }


@pytest.mark.parametrize(
    ("role", "ttft_s"),
    [pytest.param(MOCK, 2, id="mock"), pytest.param(PAGED, 0.3, id="paged", marks=pytest.mark.nightly)],
)
def test_workers_change_roles_with_the_mix_of_requests(role, ttft_s):
    answers = {}

    async def change_the_mix(url):
        connector = await find_deployment(url=url)
        for (prompts, tokens), (prefill, decode) in MIXES:
            async with Load(url, prompts, tokens=tokens, pause_s=1) as load:
                await until_ready(connector, {Role.PREFILL: prefill, Role.DECODE: decode})
                await load.more(6)
            for prompt, texts in load.answers.items():
                answers[prompt] = answers.get(prompt, set()) | texts

    settings = in_both_roles(role) | {"planner.budget.gpus": 3, "router.policy": "least-loaded"}
    with serving("--demo", *START, "--slo-ttft", str(ttft_s), **settings) as planned:
        run(change_the_mix(planned.url))
        log = command("planner", "log", "-n", "1000")
        seen = planner_metrics(planned.url)
        assert re.search(r"changed +decode-\d becomes prefill: .*\d requests/s", log)
        assert re.search(r"changed +\w+-\d becomes decode: .*\d requests/s", log)
        assert "not fewer: " in command("planner", "why", "decode")
        assert seen["penstock_planner_changes_total", "flip"] >= len(MIXES)
        assert ("penstock_planner_changes_total", "add") not in seen, "three workers fit the budget"
        workers = [seen["penstock_planner_workers", each] for each in ("prefill", "decode")]
        assert tuple(workers) == MIXES[-1][1]
    assert all(len(texts) == 1 for texts in answers.values()), "tokens are exact"
