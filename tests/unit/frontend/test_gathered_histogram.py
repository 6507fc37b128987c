"""Gathered values are counted as observed ones."""

import asyncio
import random

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from penstock.frontend import gathered_histogram
from penstock.frontend.gathered_histogram import GatheredHistogram

BOUNDS = (0.001, 0.0025, 0.1, 1.0)


async def test_what_is_read_equals_what_was_observed() -> None:
    gathered_registry, observed_registry = CollectorRegistry(), CollectorRegistry()
    gathered = GatheredHistogram("gap", "Gaps.", ["model"], registry=gathered_registry, buckets=BOUNDS)
    observed = Histogram("gap", "Gaps.", ["model"], registry=observed_registry, buckets=BOUNDS)
    rng = random.Random(0)
    for _ in range(2 * gathered_histogram._VALUES_MAX + 100):
        model, value = rng.choice("ab"), rng.choice([*BOUNDS, rng.random() / 100, 5.0])
        gathered.labels(model).gather(value)
        observed.labels(model).observe(value)
    for model in "ab":
        names = [("gap_bucket", {"le": str(bound)}) for bound in (*BOUNDS, "+Inf")] + [("gap_count", {})]
        for name, labels in names:
            of_model = {**labels, "model": model}
            value = gathered_registry.get_sample_value(name, of_model)
            assert value == observed_registry.get_sample_value(name, of_model) > 0
    assert b'gap_count{model="a"}' in generate_latest(gathered_registry)


@pytest.mark.virtual
async def test_values_are_counted_within_a_second_without_a_reader() -> None:
    histogram = GatheredHistogram("gap", "Gaps.", ["model"], registry=None, buckets=BOUNDS)
    child = histogram.labels("a")
    child.gather(0.05)
    await asyncio.sleep(0.9)
    assert child._sum.get() == 0.0
    await asyncio.sleep(0.2)
    assert child._sum.get() == 0.05
    child.gather(0.5)
    await asyncio.sleep(1.1)
    assert child._sum.get() == 0.55
