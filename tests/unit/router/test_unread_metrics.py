"""Without a registry nothing is counted, and counting harms nobody."""

from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from penstock.router.metrics import RouterMetrics


def test_every_metric_takes_what_its_counting_twin_takes():
    counting, unread = vars(RouterMetrics(CollectorRegistry())), vars(RouterMetrics(None))
    assert counting.keys() == unread.keys()
    metrics = {name: metric for name, metric in counting.items() if isinstance(metric, MetricWrapperBase)}
    assert len(metrics) > 20
    for name, metric in metrics.items():
        labels = ["any"] * len(metric._labelnames)
        for of in (metric, unread[name]):
            child = of.labels(*labels) if labels else of
            if metric._type == "histogram":
                child.observe(0.5)
            else:
                child.inc(2)
            if metric._type == "gauge":
                child.set(3)
    for metrics_of in (counting, unread):
        metrics_of["decided"]("kv", "no_prefix").inc()
        metrics_of["ended"]("stop").inc()
