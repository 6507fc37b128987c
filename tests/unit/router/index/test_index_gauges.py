"""The index's figures reach the metrics, now and then."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from penstock.router.index.gauges import IndexGauges
from penstock.router.index.radix import RadixStats
from penstock.router.metrics import RouterMetrics


@pytest.mark.virtual
async def test_figures_are_written_once_a_second_while_they_move():
    registry = CollectorRegistry()
    reads = []

    def read() -> RadixStats:
        reads.append(asyncio.get_running_loop().time())
        return RadixStats(
            nodes=1,
            pairs=10 * len(reads),
            evicted_pairs=3 * len(reads),
            unknown_removals=0,
            contradictions=0,
            num_bytes=0,
        )

    gauges = IndexGauges(RouterMetrics(registry), read, lambda: "do this")
    for _ in range(100):
        gauges.events += 2
        gauges.note()
        await asyncio.sleep(0.025)
    await asyncio.sleep(60)
    assert len(reads) == 3
    assert registry.get_sample_value("penstock_router_indexed_blocks") == 30
    assert registry.get_sample_value("penstock_router_evicted_blocks_total") == 9
    assert registry.get_sample_value("penstock_router_kv_events_total") == 200


@pytest.mark.virtual
async def test_that_blocks_are_forgotten_for_want_of_room_is_warned_of_once_a_minute():
    evicted = 0

    def read() -> RadixStats:
        return RadixStats(1, 10, evicted, 0, 0, 0)

    gauges = IndexGauges(RouterMetrics(CollectorRegistry()), read, lambda: "do this")
    with capture_logs() as logs:
        gauges.note()
        await asyncio.sleep(2)
        assert not logs
        for evicted in range(1, 100):  # noqa: B007 - `read` gives it
            gauges.note()
            await asyncio.sleep(1)
    assert [(log["event"], log["blocks"], log["fix"]) for log in logs] == 2 * [("index_full", 10, "do this")]
