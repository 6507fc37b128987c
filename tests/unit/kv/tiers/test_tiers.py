import numpy as np
import pytest

from penstock.core.types.events import AllBlocksCleared, BlockRemoved, BlockStored, Tier
from penstock.core.wire import unpack_hashes
from penstock.kv.pool.pool import BlockPool
from penstock.kv.tiers.tiers import TierBlocks, TieredPool


class Copies:
    def __init__(self):
        self.done = []

    def write_back(self, source, target):
        self.done.append((source.tier, list(source.block_ids), target.tier, list(target.block_ids)))


def make(device=4, host=4, disk=0):
    copies = Copies()
    lower = [BlockPool(host, 16, tier=Tier.HOST)]
    lower += [BlockPool(disk, 16, tier=Tier.DISK)] if disk else []
    return TieredPool(BlockPool(device, 16), lower, copies), copies


def chain(first, count):
    return np.array([(first + n, 7) for n in range(count)], dtype=np.uint64)


def store(pool, hashes):
    blocks = pool.allocate(len(hashes))
    pool.commit(blocks, hashes, None)
    return blocks


def told(pool):
    return [
        (type(e).__name__, str(e.tier), unpack_hashes(e.block_hashes).tolist()) for e in pool.take_events()
    ]


def test_what_the_device_gives_up_goes_to_the_host_and_is_told_there_before_it_is_gone():
    pool, copies = make()
    pool.release(store(pool, chain(10, 3)))
    pool.take_events()
    pool.release(store(pool, chain(20, 3)))
    assert copies.done == [(Tier.DEVICE, [1, 2], Tier.HOST, [0, 1])]
    host, *device = pool.take_events()
    assert (host.tier, host.parent_block_hash) == (Tier.HOST, 10)
    assert unpack_hashes(host.block_hashes).tolist() == [11, 12]
    assert [type(event) for event in device] == [BlockRemoved, BlockStored]
    assert unpack_hashes(device[0].block_hashes).tolist() == [12, 11]


def test_what_comes_back_stays_below_and_is_not_written_again():
    pool, copies = make()
    first = chain(10, 4)
    pool.release(store(pool, first))
    pool.release(store(pool, chain(20, 4)))
    assert len(copies.done) == 1
    runs = pool.beneath(first)
    assert runs == [TierBlocks(Tier.HOST, [0, 1, 2, 3])]
    fetch, blocks = pool.begin(runs)
    assert (fetch.sources, fetch.targets) == (tuple(runs), blocks)
    assert pool.tiers[1].num_active == 4
    pool.commit(blocks, first, None)
    pool.end(fetch)
    pool.release(blocks)
    assert pool.tiers[1].num_active == 0
    # The host was all being read, so that what went for it is lost.
    assert len(copies.done) == 1
    assert pool.match(chain(20, 4)) == []
    pool.take_events()
    pool.release(store(pool, chain(30, 4)))
    assert len(copies.done) == 1
    assert told(pool) == [
        ("BlockRemoved", "device", [13, 12, 11, 10]),
        ("BlockStored", "device", [30, 31, 32, 33]),
    ]


def test_what_the_host_gives_up_goes_to_the_disk_first():
    pool, copies = make(device=2, host=2, disk=8)
    for first in (10, 20, 30):
        pool.release(store(pool, chain(first, 2)))
    assert copies.done == [
        (Tier.DEVICE, [0, 1], Tier.HOST, [0, 1]),
        (Tier.HOST, [0, 1], Tier.DISK, [0, 1]),
        (Tier.DEVICE, [0, 1], Tier.HOST, [0, 1]),
    ]
    assert pool.beneath(chain(10, 2)) == [TierBlocks(Tier.DISK, [0, 1])]


def test_a_prefix_goes_on_with_what_the_device_has_behind_a_gap():
    """Two sequences compute the same beginning; the one that it is cached for ends first, and it is evicted first."""
    pool, _ = make(device=6, host=6)
    hashes = chain(10, 3)
    cached, private = store(pool, hashes[:2]), pool.allocate(3)
    pool.commit(private, hashes, None)
    pool.release(cached)
    pool.release(private)
    filler = store(pool, chain(50, 5))
    assert pool.match(hashes) == []
    runs = pool.beneath(hashes)
    assert [(run.tier, len(run.block_ids)) for run in runs] == [(Tier.HOST, 2), (Tier.DEVICE, 1)]
    pool.release(filler)
    fetch, blocks = pool.begin(runs)
    assert blocks == [*fetch.targets, *runs[1].block_ids]
    assert len(fetch.targets) == 2
    pool.commit(blocks, hashes, None)
    assert pool.match(hashes) == blocks


def test_clearing_clears_all_tiers_and_says_so_once():
    pool, _ = make()
    pool.release(store(pool, chain(10, 4)))
    pool.release(store(pool, chain(20, 4)))
    pool.reset()
    assert pool.take_events() == (AllBlocksCleared(),)
    assert pool.beneath(chain(10, 4)) == []
    pool.check()


@pytest.mark.parametrize(
    "lower", [[BlockPool(4, 16)], [BlockPool(4, 8, tier=Tier.HOST)], 2 * [BlockPool(4, 16, tier=Tier.DISK)]]
)
def test_tiers_are_different_and_have_one_block_size(lower):
    with pytest.raises(ValueError, match="tiers: must be different ones with one block size"):
        TieredPool(BlockPool(4, 16), lower, Copies())
