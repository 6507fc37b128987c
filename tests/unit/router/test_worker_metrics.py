"""Gauges of what workers report: their KV tiers, and links to other regions; and metrics without a registry."""

import msgspec
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from penstock.core.types.events import Tier
from penstock.core.types.load import KvTierCounts, LinkProblem, LinkReport
from penstock.router.metrics import RouterMetrics

HOST = KvTierCounts(tier=Tier.HOST, total_blocks=8, cached_blocks=2, block_bytes=100, load_s=0.5, saved_s=1.5)
DISK = KvTierCounts(tier=Tier.DISK, total_blocks=80, block_bytes=100, is_off=True)
LINK = LinkReport(
    region="eu", frontends=3, healthy=2, moved=5, refused=7, clock_skew_s=-1.5, round_trip_s=0.081, advertised_chunks=9, advertised_at_s=1e9,
)  # fmt: skip
LINK_VALUES = {
    "frontends": 3, "healthy_frontends": 2, "moved_requests": 5, "refused_requests": 7, "clock_skew_seconds": -1.5,
    "round_trip_seconds": 0.081, "advertised_timestamp_seconds": 1e9, "advertised_share": 1,
}  # fmt: skip


class Shown:
    """Metrics, and the values of one worker's series."""

    def __init__(self):
        self.registry = CollectorRegistry()
        self.metrics = RouterMetrics(self.registry)

    def __call__(self, noun, worker="worker-1", **labels):
        return self.registry.get_sample_value(f"penstock_router_{noun}", {"worker": worker, **labels})

    def link(self, noun, **labels):
        return self(f"link_{noun}", worker="link-eu", region="eu", **labels)


@pytest.fixture
def shown():
    return Shown()


def test_tiers_of_a_worker_are_shown_until_it_is_gone(shown):
    tiers = shown.metrics.kv_tiers
    tiers.show("worker-1", (HOST, DISK))
    tiers.show("worker-2", (HOST,))
    expected = {"cached_blocks": 2, "cached_bytes": 200, "total_bytes": 800, "load_seconds": 0.5, "off": 0}
    assert {noun: shown(f"kv_tier_{noun}", tier="host") for noun in expected} == expected
    assert shown("kv_tier_off", tier="disk") == 1
    tiers.forget("worker-1")
    tiers.forget("worker-3")
    assert shown("kv_tier_cached_blocks", tier="host") is None
    assert shown("kv_tier_cached_blocks", worker="worker-2", tier="host") == 2


def test_series_of_several_processes_are_set_to_zero(shown, monkeypatch):
    shown.metrics.kv_tiers.show("worker-1", (HOST,))
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "anywhere")
    shown.metrics.kv_tiers.forget("worker-1")
    assert shown("kv_tier_cached_blocks", tier="host") == 0


def test_each_figure_of_a_link_is_a_gauge(shown):
    links = shown.metrics.links
    links.show("link-eu", LINK)
    assert {noun: shown.link(noun) for noun in LINK_VALUES} == LINK_VALUES
    links.show("worker-1", None)
    links.show_advertised_share("link-eu", 0.25)
    links.show("link-eu", msgspec.structs.replace(LINK, healthy=3))
    assert (shown.link("healthy_frontends"), shown.link("advertised_share")) == (3, 0.25)
    links.forget("link-eu")
    links.forget("link-eu")
    assert not any(shown.link(noun) for noun in LINK_VALUES)
    links.show_advertised_share("link-eu", 0.5)
    assert shown.link("advertised_share") is None


def test_one_problem_at_a_time_is_shown_and_a_link_that_never_came_has_one(shown):
    links = shown.metrics.links
    links.expect("link-eu", "eu", 2)
    assert (shown.link("frontends"), shown.link("healthy_frontends")) == (2, 0)
    assert shown.link("problem", problem="unreachable") == 1
    for problem in (LinkProblem.CERTIFICATE, LinkProblem.KEY, LinkProblem.SECRET):
        links.show("link-eu", msgspec.structs.replace(LINK, problem=problem))
        assert [each for each in LinkProblem if shown.link("problem", problem=each)] == [problem]
    links.show("link-eu", LINK)
    assert not any(shown.link("problem", problem=each) for each in LinkProblem)


def test_without_a_registry_every_metric_takes_what_its_counting_twin_takes(shown):
    counting, unread = vars(shown.metrics), vars(RouterMetrics(None))
    assert counting.keys() == unread.keys()
    metrics = {name: metric for name, metric in counting.items() if isinstance(metric, MetricWrapperBase)}
    assert len(metrics) > 20
    for name, metric in metrics.items():
        (family,) = metric.collect()
        labels = ["any"] * len(metric._labelnames)
        child = unread[name].labels(*labels) if labels else unread[name]
        if family.type == "histogram":
            child.observe(0.5)
        elif family.type == "gauge":
            child.set(3)
        else:
            child.inc(2)
    unread["decided"]("kv", "no_prefix").inc()
    unread["ended"]("stop").inc()
