"""What a region tells of its prefixes counts as far as its answers confirm it."""

import numpy as np
import pytest

from penstock.core.types.events import BlockStored
from penstock.core.types.kv import CHUNK_TOKENS
from penstock.core.wire import pack_hashes
from penstock.router.indexer import AdvertisedShare, RegionIndex
from penstock.router.radix import PrefixMatch

BLOCK, LINK = 16, 1


def test_doubts_grow_with_what_is_not_found_and_are_forgiven():
    share = AdvertisedShare(0.0)
    assert share.at(100.0) == 1.0
    for _ in range(20):
        share.learn(1000, 0, 100.0)
    assert share.at(100.0) < 0.01
    assert share.at(160.0) == pytest.approx(0.5, abs=0.01)
    assert share.at(1000.0) > 0.99


def test_it_settles_at_the_share_that_is_found_and_a_region_that_has_more_than_it_advertised_counts_whole():
    share = AdvertisedShare(0.0)
    for _ in range(200):
        expected = round(1000 * share.at(0.0))  # as routers expect then
        share.learn(expected, min(expected, 400), 0.0)
    assert share.at(0.0) == pytest.approx(0.4, abs=0.05)
    for _ in range(200):
        share.learn(100, 5000, 0.0)
    assert share.at(0.0) == pytest.approx(1.0, abs=0.05)
    share.learn(0, 0, 0.0)
    assert share.at(0.0) == pytest.approx(1.0, abs=0.05), "nothing was expected"


def test_a_prefix_of_a_region_that_is_doubted_counts_in_part():
    now_s = 0.0
    index = RegionIndex(clock=lambda: now_s)
    hashes = np.arange(1, 129, dtype=np.uint64)
    chunks = hashes[CHUNK_TOKENS // BLOCK - 1 :: CHUNK_TOKENS // BLOCK]
    advertised = BlockStored(
        block_hashes=pack_hashes(chunks), parent_block_hash=None, block_size=CHUNK_TOKENS
    )
    assert index.apply(LINK, [advertised], BLOCK) == 0

    def depth(own: int = 0) -> int:
        match = PrefixMatch(np.array([0, own], np.int32), np.zeros((4, 2), np.int32))
        return int(index.deepened(match, hashes, BLOCK, (LINK,)).depths[LINK])

    assert depth() == 128
    for _ in range(5):
        index.found(LINK, 2048, 0)
    assert 0 < depth() < 64
    assert depth(own=100) == 100, "what was sent there counts whole"
    now_s = 3600.0
    assert depth() >= 127
    index.found(LINK, 2048, 0)
    index.forget(LINK)
    index.apply(LINK, [advertised], BLOCK)
    assert depth() == 128, "a new link begins anew"
