"""When a worker reports its load, on virtual time."""

import asyncio

import pytest

from penstock.core.types.events import Tier
from penstock.core.types.load import KvTierCounts, WorkerLoad
from penstock.worker.config import WorkerConfig
from penstock.worker.reports import LoadReports


@pytest.mark.virtual
async def test_an_idle_worker_tells_what_was_copied_to_a_tier_since():
    load, sent = WorkerLoad(running_requests=1), []
    reports = LoadReports(WorkerConfig(), lambda: load, sent.append)
    reports.note()
    for blocks in (1, 2, 3):
        load = WorkerLoad(kv_tiers=(KvTierCounts(tier=Tier.HOST, cached_blocks=blocks),))
        reports.note()  # it becomes idle: at once
        await asyncio.sleep(0.5 if blocks == 1 else 0)
    assert len(sent) == 2
    await asyncio.sleep(5)
    assert len(sent) == 3
    reports.note()
    await asyncio.sleep(5)
    reports.close()
    assert len(sent) == 3
