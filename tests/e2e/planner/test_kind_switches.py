"""A planner that turns an aggregated deployment into a disaggregated one and back: real processes, no stream fails, tokens are exact."""

import re

import pytest

from penstock.core.types.instances import Role
from penstock.deploy.control.local_connector import find_deployment
from tests.e2e.helpers.planned import command, planner_metrics, ready, run, serving, until
from tests.support.streams import Load

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.usefixtures("runtime_dir")]

A, P, D = Role.AGGREGATED, Role.PREFILL, Role.DECODE
READING = [f"{number} " + "a long text to read. " * 100 for number in range(4)], 24
"""Prompts of about 600 tokens: 0.6 s each, by which streams beside them miss an ITL of 100 ms, five steps. Three aggregated workers serve
one such request a second within it; two prefill workers and a decode worker serve three."""
CHATTING = [f"{number} short" for number in range(2)], 8
"""One aggregated worker is enough, and half of what the disaggregated roles need."""
MOCK = {
    "engine": "mock",
    "max_running_requests": 16,
    "mock.timing.step_s": 0.02,
    "mock.timing.prefill_s_per_token": 0.001,
    "mock.kv_bytes_per_block": 128,  # the content of the KV that is transferred is checked
}
ROLES = {
    f"roles.{role}.{name}": value
    for role in ("aggregated", "prefill", "decode")
    for name, value in (MOCK | {"replicas": int(role == "aggregated")}).items()
}
FLAGS = ("--demo", "--max-workers", "3", "--slo-ttft", "6", "--slo-itl", "0.1")


def is_disaggregated(scale):
    counts = ready(scale)
    return not scale.of(A) and min(counts[P], counts[D]) > 0


def is_aggregated(scale):
    return ready(scale)[A] > 0 and not scale.of(P) and not scale.of(D)


def test_a_deployment_is_disaggregated_for_long_prompts_and_aggregated_again():
    answers = {}

    async def change_the_load(url):
        connector = await find_deployment(url=url)
        for (prompts, tokens), pause_s, holds in (
            (READING, 0.5, is_disaggregated),
            (CHATTING, 1, is_aggregated),
        ):
            async with Load(url, prompts, tokens=tokens, pause_s=pause_s) as load:
                await until(connector, holds)
                await load.more(len(prompts))
            for prompt, texts in load.answers.items():
                answers[prompt] = answers.get(prompt, set()) | texts

    with serving(*FLAGS, **ROLES) as planned:
        run(change_the_load(planned.url))
        log = command("planner", "log", "-n", "1000")
        why = command("planner", "why", "aggregated")
        seen = planner_metrics(planned.url)
    assert re.search(r"changed .*prefill 0 -> \d, decode 0 -> \d .* requests/s", log)
    assert re.search(r"changed .*aggregated 0 -> \d .* requests/s", log)
    assert "not fewer: " in why
    assert seen["penstock_planner_workers", "aggregated"] >= 1
    assert ("penstock_planner_rounds_total", "failed") not in seen
    assert all(len(texts) == 1 for texts in answers.values()), "tokens are exact"
