"""What /metrics shows, for one process and for several."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter

from penstock.frontend.metrics import FrontendMetrics

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
