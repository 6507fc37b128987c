"""When a worker reports its load, on virtual time."""

import asyncio

from penstock.core.types.events import Tier
from penstock.core.types.load import KvTierCounts, WorkerLoad
from penstock.sim.loop.loop import run_virtual
from penstock.worker.config import WorkerConfig
from penstock.worker.reports import LoadReports


class Worker:
    """What the reports read, and what they sent with the moment of it."""

    def __init__(self) -> None:
        self.load = WorkerLoad()
        self.sent: list[tuple[float, int]] = []
        self.reports = LoadReports(WorkerConfig(), lambda: self.load, self._take)

    def _take(self, load: WorkerLoad) -> None:
        self.sent.append((asyncio.get_running_loop().time(), load.waiting_requests))

    def wait_for(self, requests: int) -> None:
        self.load = WorkerLoad(running_requests=1, waiting_requests=requests)
        self.reports.note()


def test_a_change_is_told_an_interval_after_the_last_report():
    async def scenario():
        worker = Worker()
        start_s = asyncio.get_running_loop().time()
        worker.wait_for(0)  # it becomes busy: at once
        worker.wait_for(1)
        await asyncio.sleep(0.01)
        worker.wait_for(2)
        await asyncio.sleep(0.1)
        worker.reports.close()
        return [(round(at_s - start_s, 6), waiting) for at_s, waiting in worker.sent]

    assert run_virtual(scenario()) == [(0.0, 0), (0.05, 2)]


def test_an_idle_worker_tells_what_was_copied_to_a_tier_since():
    async def scenario():
        worker = Worker()
        worker.wait_for(0)
        worker.load = WorkerLoad(kv_tiers=(KvTierCounts(tier=Tier.HOST, cached_blocks=1),))
        worker.reports.note()  # it becomes idle: at once
        await asyncio.sleep(0.5)
        for blocks in (2, 3):
            worker.load = WorkerLoad(kv_tiers=(KvTierCounts(tier=Tier.HOST, cached_blocks=blocks),))
            worker.reports.note()
        assert len(worker.sent) == 2
        await asyncio.sleep(5)
        assert len(worker.sent) == 3
        worker.reports.note()
        await asyncio.sleep(5)
        worker.reports.close()
        return len(worker.sent)

    assert run_virtual(scenario()) == 3
