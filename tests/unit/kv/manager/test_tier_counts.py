"""What the manager counts of each tier, on a clock that the test sets."""

import numpy as np
import pytest

from penstock.core.hashing import block_hashes
from penstock.core.types.events import Tier
from penstock.kv.manager.counters import TierCounters
from penstock.kv.manager.manager import KvManager
from penstock.kv.manager.prefix_loads import PrefixLoads
from penstock.kv.pool.pool import BlockPool
from tests.support.held_tier import HeldTier
from tests.support.manual_clock import ManualClock

SIZE = 4
HASHES = block_hashes(np.arange(10 * SIZE, dtype=np.int32), SIZE)


class Stage:
    """A host tier with the first 6 blocks, a disk tier with all 10, and 10 ms for each prompt token."""

    def __init__(self):
        self.clock = ManualClock()
        self.host = HeldTier(HASHES[:6, 0].tolist())
        self.disk = HeldTier(HASHES[:, 0].tolist())
        self.disk.tier = Tier.DISK
        self.pool = BlockPool(64, SIZE)
        self.kv = KvManager(self.pool, [self.host, self.disk], lambda: None, clock=self.clock)
        self.kv.prefill.measure(100, 1.0)

    def load(self, host_s, disk_s, *, host_blocks=None, disk_blocks=None):
        """Load all blocks, the host's after `host_s` and the disk's after `disk_s`; returns what arrived."""
        self.kv.begin("r", self.kv.choose_runs(HASHES, [], 41))
        begun_s = self.clock.now_s
        ends = [(host_s, self.host, host_blocks), (disk_s, self.disk, disk_blocks)]
        for end_s, tier, blocks in sorted(ends, key=lambda end: end[0]):
            self.clock.now_s = begun_s + end_s
            tier.loads[-1].end(blocks)
        return [(name, blocks) for name, blocks, is_over in self.take_arrived() if is_over]

    def take_arrived(self):
        return [(name, len(block_ids), is_over) for name, block_ids, is_over in self.kv.take_arrived()]


def test_what_each_tier_brought_and_the_time_that_it_saved():
    stage = Stage()
    assert stage.load(0.03, 0.1) == [("r", 10)]
    host, disk = stage.kv.counts
    assert (host.tier, host.loads, host.loaded_blocks, host.load_s) == (Tier.HOST, 1, 6, 0.03)
    assert (disk.tier, disk.loads, disk.loaded_blocks, disk.load_s) == (Tier.DISK, 1, 4, 0.1)
    assert host.saved_s == pytest.approx(6 * SIZE * 0.01 - 0.03)
    assert disk.saved_s == pytest.approx(4 * SIZE * 0.01 - 0.07), "both wait for the first 30 ms"
    assert (host.cached_blocks, disk.cached_blocks) == (6, 10)


def test_blocks_after_one_that_did_not_arrive_are_its_tiers_loss():
    stage = Stage()
    stage.disk.keys.difference_update(HASHES[:6, 0].tolist())
    assert stage.load(0.03, 0.01, host_blocks=2) == [("r", 2)]
    host, disk = stage.kv.counts
    assert (host.loaded_blocks, host.missing_blocks) == (2, 8)
    assert (disk.loaded_blocks, disk.missing_blocks) == (0, 0)


def test_what_a_tier_did_not_bring_the_next_one_brings():
    stage = Stage()
    assert stage.load(0.03, 0.01, host_blocks=2) == []
    stage.clock.now_s = 0.05
    stage.disk.loads[-1].end()
    assert stage.take_arrived() == [("r", 8, True)], "two came before"
    host, disk = stage.kv.counts
    assert (host.loads, host.loaded_blocks, host.missing_blocks) == (1, 2, 0)
    assert (disk.loads, disk.loaded_blocks, disk.missing_blocks) == (2, 8, 0)
    assert disk.load_s == pytest.approx(0.01 + 0.02)
    assert host.saved_s + disk.saved_s == pytest.approx(10 * SIZE * 0.01 - 0.05)


def test_only_loads_under_way_are_late():
    stage = Stage()
    stage.kv.begin("r", stage.kv.choose_runs(HASHES, [], 41))
    stage.host.loads[0].end()
    stage.clock.advance(60)
    assert [counts.late_loads for counts in stage.kv.counts] == [0, 1]
    assert stage.disk.loads[0].is_cancelled


def test_the_blocks_of_a_source_that_cannot_begin_come_free():
    stage = Stage()
    stage.host.broken = stage.disk.broken = OSError("no thread is left")
    free = stage.pool.num_available
    stage.kv.begin("r", stage.kv.choose_runs(HASHES, [], 41))
    stage.clock.advance(0)
    assert stage.take_arrived() == [("r", 0, True)]
    stage.pool.release(range(10))  # the request's own
    assert (stage.pool.num_available, stage.kv.holders().total()) == (free, 0)


def test_what_a_transfer_cannot_use_is_not_counted_as_loaded():
    tiers = [HeldTier(HASHES[:2, 0].tolist()), HeldTier(HASHES[2:6, 0].tolist())]
    counters = {tier: TierCounters() for tier in tiers}
    loads, arrived = PrefixLoads(tiers, SIZE, counters=counters, clock=ManualClock()), []
    peer = HeldTier()
    loads.load(loads.find(HASHES, 0, peer), range(6), peer, arrived.append)
    tiers[1].loads[0].end()
    tiers[0].loads[0].end(1)
    assert arrived == [1]
    assert [(each.loads, each.loaded_blocks, each.hit_tokens) for each in counters.values()] == [
        (1, 1, SIZE),
        (1, 0, 0),
    ]
