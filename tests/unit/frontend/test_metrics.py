"""What /metrics shows, for one process and for several, and gathered values beside observed ones."""

import asyncio
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from penstock.frontend import metrics
from penstock.frontend.metrics import FrontendMetrics, GatheredHistogram

COUNT_ONE_REQUEST = """
from types import SimpleNamespace
from prometheus_client import CollectorRegistry
from penstock.frontend.metrics import FrontendMetrics
metrics = FrontendMetrics(CollectorRegistry())
metrics.inflight(1)
metrics.answered("/v1/completions", 200)
metrics.timer("tiny", 0.0, 1).tokens(1, 0.5, None, SimpleNamespace(waited_for_decode=False))
print(metrics.expose().decode())
"""


def test_all_of_the_registry_is_shown() -> None:
    registry = CollectorRegistry()
    Counter("penstock_router_requests", "Somebody else's.", registry=registry).inc()
    metrics = FrontendMetrics(registry)
    metrics.answered("/health", 200)
    text = metrics.expose().decode()
    assert "penstock_router_requests_total 1.0" in text
    assert 'penstock_frontend_requests_total{code="200",route="/health"} 1.0' in text


@pytest.mark.slow
def test_several_processes_answer_for_each_other(tmp_path: Path) -> None:
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    for count in (1, 2):
        text = subprocess.run(
            [sys.executable, "-c", COUNT_ONE_REQUEST],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert f'penstock_frontend_requests_total{{code="200",route="/v1/completions"}} {count}.0' in text
        assert f'penstock_frontend_ttft_seconds_count{{model="tiny"}} {count}.0' in text


BOUNDS = (0.001, 0.0025, 0.1, 1.0)


async def test_what_is_read_equals_what_was_observed() -> None:
    gathered_registry, observed_registry = CollectorRegistry(), CollectorRegistry()
    gathered = GatheredHistogram("gap", "Gaps.", ["model"], registry=gathered_registry, buckets=BOUNDS)
    observed = Histogram("gap", "Gaps.", ["model"], registry=observed_registry, buckets=BOUNDS)
    rng = random.Random(0)
    for _ in range(2 * metrics._VALUES_MAX + 100):
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
