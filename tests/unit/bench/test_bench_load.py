import asyncio
import itertools

import pytest

from penstock.bench.load import (
    PROBES,
    PlannedRequest,
    Prompts,
    PromptScale,
    poisson,
    replay,
    run_load,
    steady,
)
from penstock.sim.trace import TraceRow

PROMPTS = Prompts(seed=1, scale=PromptScale(overhead_tokens=10, tokens_per_word=2))


def test_the_scale_is_the_line_through_the_probes():
    short, long = (10 + 2 * len(probe.split()) for probe in PROBES)
    scale = PromptScale.fit((short, long))
    assert scale == PromptScale(10.0, 2.0)
    assert scale.words(100) == 50
    assert PromptScale.fit((40, 40)).tokens_per_word > 0


def test_prompts_have_the_wanted_length_and_share_nothing():
    first, second = PROMPTS.unique(0, 210), PROMPTS.unique(1, 210)
    assert len(first.split()) == len(second.split()) == 100
    assert first.split()[:8] != second.split()[:8]
    assert first == Prompts(1, PromptScale(10, 2)).unique(0, 210)
    assert PROMPTS.unique(0, 1) != ""


def test_equal_leading_ids_are_an_equal_prefix():
    one, two = PROMPTS.shared((7, 8, 9), 1400).split(), PROMPTS.shared((7, 8, 5), 1500).split()
    assert (len(one), len(two)) == (695, 745)
    assert one[:512] == two[:512]
    assert one[512:520] != two[512:520]


def test_a_steady_plan_has_no_times_and_a_random_one_has_its_rate():
    assert all(planned.at_s is None for planned in itertools.islice(steady(PROMPTS, 20, 4), 5))
    times = [planned.at_s for planned in itertools.islice(poisson(PROMPTS, 20, 4, rate=100.0, seed=3), 1001)]
    assert times[0] == 0.0
    assert times == sorted(times)
    assert 8 < times[-1] < 12


def test_a_trace_is_sped_up_and_cut():
    rows = [TraceRow(0.0, 5000, 500, (1, 2)), TraceRow(3.0, 30, 0)]
    first, second = replay(rows, PROMPTS, speed=2.0, input_max=1000, output_max=100)
    assert (len(first.prompt.split()), first.output_tokens, first.at_s) == (495, 100, 0.0)
    assert (len(second.prompt.split()), second.output_tokens, second.at_s) == (10, 1, 1.5)


def test_no_more_are_under_way_than_allowed_and_all_end():
    running, most, ended = 0, 0, []

    async def send(planned, due_s):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        ended.append((planned.prompt, due_s))

    plan = (PlannedRequest(str(index), 1) for index in range(20))
    asyncio.run(run_load(plan, send, concurrency=3, duration_s=None))
    assert most == 3
    assert sorted(ended) == sorted((str(index), None) for index in range(20))


def test_requests_are_sent_when_they_are_due_and_none_after_the_duration():
    sent = []

    async def send(planned, due_s):
        sent.append((planned.prompt, due_s))

    async def run(duration_s):
        plan = iter([PlannedRequest("a", 1, 0.0), PlannedRequest("b", 1, 0.01)])
        await run_load(plan, send, concurrency=9, duration_s=duration_s)

    asyncio.run(run(0.0))
    assert sent == []
    asyncio.run(run(None))
    (first, first_s), (second, second_s) = sent
    assert (first, second) == ("a", "b")
    assert second_s - first_s == pytest.approx(0.01)
