"""The experiment `regions`: its requests, and a small run of it."""

import math
import random

import pytest

from benchmarks.regions import command
from benchmarks.regions.traffic import Traffic, questions


def test_busy_hours_follow_each_other_and_documents_are_shared() -> None:
    traffic = Traffic(3, 60.0, 40.0, documents=50)
    asked = list(questions(traffic, random.Random(1)))
    assert [each.at_s for each in asked] == sorted(each.at_s for each in asked)
    assert len(asked) == pytest.approx(3 * 60 * 40, rel=0.05)
    for region in range(3):
        mine = [each.at_s for each in asked if each.region == region]
        phase = sum(math.sin(2 * math.pi * (at_s / 60.0 - region / 3)) for at_s in mine) / len(mine)
        assert phase == pytest.approx(0.4, abs=0.05), "half of the swing"
    first = {each.prompt.shared.tobytes() for each in asked if each.region == 0}
    second = {each.prompt.shared.tobytes() for each in asked if each.region == 1}
    assert 0 < len(first & second) <= 50
    assert len(first - second) <= 50 + 10
    assert len({each.prompt.own for each in asked}) == len(asked)


def test_a_small_run_has_the_figures_of_each_way() -> None:
    size = command.Size(workers=2, per_worker_s=0.4, day_s=20.0, documents=10)
    alone = command.measure("alone", size)
    told = command.measure("summary_64k", size)
    assert alone["crossed_share"] == 0 < told["crossed_share"]
    assert told["hit_ratio"] > alone["hit_ratio"]
    assert 0 < told["summary_bytes_per_s"] < 64_000
    assert told["told_chunks"] > 0
    assert told["decision_us"] > 0
