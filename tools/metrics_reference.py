"""Writes docs/metrics.md, the table of all Prometheus metrics, from the code that makes them: `python tools/metrics_reference.py`."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from penstock.deploy.operator.http import OperatorMetrics
from penstock.deploy.processes.frontend_process import PlannerMetrics, process_failures
from penstock.frontend.metrics import FrontendMetrics
from penstock.router.metrics import RouterMetrics

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
HEAD = """# Metrics

What `GET /metrics` of a deployment has, for Prometheus; made by `tools/metrics_reference.py`. Several frontend processes of a port answer with the sums
of all. `penstock_operator_*` are those of [the operator](kubernetes.md#the-operator). A histogram has `_bucket`, `_sum` and `_count`. [Dashboard and alert rules](operations.md#prometheus-and-grafana) are ready to use; the transfer library
has [metrics of its own](transfer-reference.md#metrics).

| metric | type | labels | meaning |
|---|---|---|---|
"""


def metrics() -> Iterator[tuple[str, str, tuple[str, ...], str]]:
    """Yield (name as Prometheus has it, type, labels, meaning) of each metric, by name."""
    registry = CollectorRegistry()
    FrontendMetrics(registry)
    RouterMetrics(registry)
    PlannerMetrics(registry)
    OperatorMetrics(registry)
    process_failures(registry)
    collectors: dict[Any, Any] = registry._collector_to_names  # the public API gives none without samples
    found = []
    for metric in collectors:
        if isinstance(metric, MetricWrapperBase):
            name = f"{metric._name}_total" if metric._type == "counter" else metric._name
            found.append((name, metric._type, tuple(metric._labelnames), metric._documentation))
    yield from sorted(found)


def page() -> str:
    """Return the page."""
    rows = (
        f"| `{name}` | {kind} | {', '.join(labels) or '-'} | {text.rstrip('.')} |\n"
        for name, kind, labels, text in metrics()
    )
    return HEAD + "".join(rows)


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page())
    PAGE.write_text(page(), encoding="utf-8")
