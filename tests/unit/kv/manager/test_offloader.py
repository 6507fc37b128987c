"""Offloads: what a tier admits, how much it takes now, and its bandwidth budget."""

import numpy as np
import pytest

from penstock.core.hashing import block_hashes
from penstock.kv.manager.admission import SeenBlocks
from penstock.kv.manager.counters import TierCounters
from penstock.kv.manager.offloader import Offloader
from penstock.kv.pool.pool import BlockPool
from penstock.kv.pool.use import BlockUse
from penstock.seams.kv import Admission, OffloadMode, OffloadPolicy
from tests.support.held_tier import HeldTier
from tests.support.manual_clock import ManualClock


def chain(seed, length=8):
    return block_hashes(np.full(length * 4, seed, np.int32), 4)


class Scene:
    """An offloader over one tier, and a pool that caches prefixes."""

    def __init__(self, policy=None, *, num_blocks=640, eviction="lru"):
        self.tier = HeldTier(offload_policy=policy)
        self.clock = ManualClock()
        self.counters = TierCounters()
        self.pool = BlockPool(num_blocks, 4, eviction)
        tiers = {self.tier: self.counters}
        self.offloader = Offloader(self.pool, [self.tier], lambda: None, tiers, self.clock)

    def leave(self, seed, length=8):
        """Let a request with this prompt leave the batch."""
        hashes = chain(seed, length)
        held = len(self.pool.match(hashes))
        taken = self.pool.allocate(length - held)
        self.pool.commit(taken, hashes[held:], int(hashes[held - 1, 0]) if held else None)
        self.pool.release(taken, BlockUse())
        self.offloader.offload(hashes)
        self.offloader.look_ahead(self.pool.take_events())

    def copied(self):
        """End the copies under way; returns how many blocks they were."""
        count = 0
        while self.tier.offloads:
            count += len(self.tier.offloads[0][1])
            self.tier.end_offload()
        return count


def test_a_tier_that_admits_what_was_seen_twice_gets_the_part_that_came_back():
    scene = Scene(OffloadPolicy(Admission.SEEN_TWICE))
    scene.leave(1, 6)
    assert scene.copied() == 0
    scene.leave(1, 8)
    assert scene.copied() == 6
    scene.leave(1, 8)
    assert scene.copied() == 2
    scene.leave(2)
    assert scene.copied() == 0
    assert scene.counters.offloaded_blocks == 8
    assert scene.counters.dropped_blocks == 0, "what is not admitted was not meant to be copied"


def test_seen_blocks_are_bounded_and_forget_the_older_ones():
    seen = SeenBlocks(entries=1024)
    assert seen.see(chain(0)) == 0
    assert seen.see(chain(0)) == 8
    for seed in range(1, 1000):
        seen.see(chain(seed))
    assert seen.see(chain(0)) == 0
    assert seen.see(chain(999)) == 8


def test_a_tier_without_room_lets_prefixes_wait_until_it_has_some():
    scene = Scene()
    scene.tier.offload_room = 3
    scene.leave(1)
    assert [len(read) for _, read, _ in scene.tier.offloads] == [3, 3, 2]
    scene.copied()
    scene.tier.offload_room = 0
    scene.leave(2)
    assert scene.copied() == 0
    scene.tier.offload_room = 8
    scene.offloader.go_on()
    assert scene.copied() == 8
    assert scene.counters.dropped_blocks == 0


def test_what_a_tier_refuses_is_counted_as_dropped_with_what_follows():
    scene = Scene()
    scene.tier.refuses_after = 3
    scene.leave(1, 8)
    assert scene.copied() == 3
    assert scene.counters.dropped_blocks == 5
    scene.tier.offload_room, scene.tier.refuses_after = 2, 1
    scene.leave(2, 8)
    assert scene.copied() == 1, "what follows a refused block is not offered"
    assert scene.counters.dropped_blocks == 5 + 7


def test_a_budget_is_kept_while_requests_run():
    scene = Scene(OffloadPolicy(bytes_per_s=32 * 8))  # 8 blocks of 32 bytes a second
    copied = []
    for seed in range(10):
        scene.leave(seed)
    for _ in range(100):
        scene.clock.advance(0.1)
        copied.append(scene.copied())
    assert sum(copied[:50]) == pytest.approx(5 * 8, abs=2)
    assert sum(copied) == pytest.approx(10 * 8, abs=2)
    assert max(copied) <= 2, "no bursts"


def test_without_requests_what_waits_is_drained():
    scene = Scene(OffloadPolicy(bytes_per_s=32.0))
    for seed in range(10):
        scene.leave(seed)
    assert scene.copied() <= 1
    scene.offloader.set_idle(True)
    assert scene.copied() >= 79
    scene.offloader.set_idle(False)
    scene.clock.advance(1.0)
    scene.leave(99)
    assert scene.copied() == 1, "what was drained is no debt"


WRITE_BACK = OffloadPolicy(mode=OffloadMode.WRITE_BACK)


def lows(chains):
    return [low for chain in chains for low in chain.block_hashes[:, 0].tolist()]


def test_write_back_copies_what_goes_next_before_it_goes():
    scene = Scene(WRITE_BACK, num_blocks=64, eviction="lfu")
    for seed in range(40):
        scene.leave(seed)
        scene.copied()
        evicted = lows(scene.pool.upcoming(8))
        assert {*evicted} <= scene.tier.keys, "a request of 8 blocks evicts only what was copied"
    assert scene.counters.dropped_blocks == 0
    cached = {*scene.pool.resident_hashes()[:, 0].tolist()}
    assert len(scene.tier.keys) < 40 * 8, "the newest are on the device alone"
    assert all({*chain(seed)[:, 0].tolist()} <= scene.tier.keys | cached for seed in range(40))


def test_write_back_never_waits_and_counts_what_it_was_too_late_for():
    scene = Scene(WRITE_BACK, num_blocks=64, eviction="seconds")
    for seed in range(40):
        scene.leave(seed)  # no copy ends
    assert scene.offloader.holders().total() == 8, "an eighth of the device"
    assert scene.counters.offloaded_blocks == 8
    while scene.copied():
        pass
    known = scene.tier.keys | {*scene.pool.resident_hashes()[:, 0].tolist()}
    assert 0 < scene.counters.dropped_blocks == 40 * 8 - len(known)
    scene.pool.check()
    assert scene.pool.num_active == 0


def test_what_is_cleared_is_neither_copied_nor_counted():
    scene = Scene(WRITE_BACK, num_blocks=64, eviction="seconds")
    for seed in range(5):
        scene.leave(seed)
    scene.pool.reset()
    scene.offloader.clear()
    scene.offloader.look_ahead(scene.pool.take_events())
    for seed in range(50, 56):
        scene.leave(seed)
    assert (scene.copied(), scene.counters.dropped_blocks) == (0, 0)
