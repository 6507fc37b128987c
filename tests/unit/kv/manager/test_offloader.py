"""Offloads: how much a tier takes now, and what it refuses."""

import numpy as np

from penstock.core.hashing import block_hashes
from penstock.kv.manager.counters import TierCounters
from penstock.kv.manager.offloader import Offloader
from penstock.kv.pool.pool import BlockPool
from penstock.kv.pool.use import BlockUse
from tests.support.held_tier import HeldTier


def chain(seed, length=8):
    return block_hashes(np.full(length * 4, seed, np.int32), 4)


class Scene:
    """An offloader over one tier, and a pool that caches prefixes."""

    def __init__(self):
        self.tier = HeldTier()
        self.counters = TierCounters()
        self.pool = BlockPool(640, 4)
        tiers = {self.tier: self.counters}
        self.offloader = Offloader(self.pool, [self.tier], lambda: None, tiers)

    def leave(self, seed, length=8):
        """Let a request with this prompt leave the batch."""
        hashes = chain(seed, length)
        held = len(self.pool.match(hashes))
        taken = self.pool.allocate(length - held)
        self.pool.commit(taken, hashes[held:], int(hashes[held - 1, 0]) if held else None)
        self.pool.release(taken, BlockUse())
        self.offloader.offload(hashes)

    def copied(self):
        """End the copies under way; returns how many blocks they were."""
        count = 0
        while self.tier.offloads:
            count += len(self.tier.offloads[0][1])
            self.tier.end_offload()
        return count


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
