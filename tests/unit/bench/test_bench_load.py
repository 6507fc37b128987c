import asyncio

import pytest

from penstock.bench.load import Planned, run_load
from penstock.bench.prompts import PROBES, Scale


def test_the_scale_is_the_line_through_the_probes():
    short, long = (10 + 2 * len(probe.split()) for probe in PROBES)
    scale = Scale.fit((short, long))
    assert scale == Scale(10.0, 2.0)
    assert scale.words(100) == 50
    assert Scale.fit((40, 40)).tokens_per_word > 0


def test_no_more_are_under_way_than_allowed_and_all_end():
    running, most, ended = 0, 0, []

    async def send(planned, due_s):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        ended.append((planned.prompt, due_s))

    plan = (Planned(str(index), 1) for index in range(20))
    asyncio.run(run_load(plan, send, concurrency=3, duration_s=None))
    assert most == 3
    assert sorted(ended) == sorted((str(index), None) for index in range(20))


def test_requests_are_sent_when_they_are_due_and_none_after_the_duration():
    sent = []

    async def send(planned, due_s):
        sent.append((planned.prompt, due_s))

    async def run(duration_s):
        plan = iter([Planned("a", 1, 0.0), Planned("b", 1, 0.01)])
        await run_load(plan, send, concurrency=9, duration_s=duration_s)

    asyncio.run(run(0.0))
    assert sent == []
    asyncio.run(run(None))
    (first, first_s), (second, second_s) = sent
    assert (first, second) == ("a", "b")
    assert second_s - first_s == pytest.approx(0.01)
