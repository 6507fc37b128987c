"""Gauges of workers' KV tiers."""

from prometheus_client import CollectorRegistry

from penstock.core.types.events import Tier
from penstock.core.types.load import KvTierCounts
from penstock.router.metrics import RouterMetrics

HOST = KvTierCounts(tier=Tier.HOST, total_blocks=8, cached_blocks=2, block_bytes=100, load_s=0.5, saved_s=1.5)
DISK = KvTierCounts(tier=Tier.DISK, total_blocks=80, block_bytes=100, is_off=True)


def shown(registry, noun, tier="host", worker="worker-1"):
    return registry.get_sample_value(f"penstock_router_kv_tier_{noun}", {"worker": worker, "tier": tier})


def test_what_a_worker_reports_is_shown_by_tier():
    registry = CollectorRegistry()
    RouterMetrics(registry).kv_tiers.show("worker-1", (HOST, DISK))
    assert shown(registry, "cached_blocks") == 2
    assert (shown(registry, "cached_bytes"), shown(registry, "total_bytes")) == (200, 800)
    assert (shown(registry, "load_seconds"), shown(registry, "saved_seconds")) == (0.5, 1.5)
    assert (shown(registry, "off"), shown(registry, "off", "disk")) == (0, 1)


def test_series_end_with_their_worker():
    registry = CollectorRegistry()
    tiers = RouterMetrics(registry).kv_tiers
    tiers.show("worker-1", (HOST, DISK))
    tiers.show("worker-2", (HOST,))
    tiers.forget("worker-1")
    tiers.forget("worker-3")
    assert shown(registry, "cached_blocks") is None
    assert shown(registry, "off", "disk") is None
    assert shown(registry, "cached_blocks", worker="worker-2") == 2
    tiers.show("worker-1", (HOST, DISK))
    assert shown(registry, "cached_blocks") == 2


def test_series_of_several_processes_are_set_to_zero(monkeypatch):
    registry = CollectorRegistry()
    tiers = RouterMetrics(registry).kv_tiers
    tiers.show("worker-1", (HOST,))
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "anywhere")
    tiers.forget("worker-1")
    assert shown(registry, "cached_blocks") == 0
