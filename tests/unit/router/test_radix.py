"""The prefix index: depths, copies, tiers, holes, eviction."""

import numpy as np

from penstock.router.radix import RadixTree


def hashes(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


def test_the_oldest_leaf_goes_first_and_its_chain_before_younger_ones():
    tree = RadixTree(6)
    tree.store(0, hashes(1, 2, 3))
    tree.store(0, hashes(11, 12, 13))
    tree.store(0, hashes(21, 22), parent=None)
    assert tree.match(hashes(1, 2, 3)).depths.tolist() == [1]
    assert tree.match(hashes(11, 12, 13)).depths.tolist() == [3]
    assert tree.stats().evicted_pairs == 2
    tree.check()


def test_a_match_keeps_a_prefix_from_being_forgotten():
    tree = RadixTree(4)
    tree.store(0, hashes(1, 2))
    tree.store(0, hashes(11, 12))
    assert tree.match(hashes(1, 2)).depths.tolist() == [2]
    tree.store(0, hashes(21, 22))
    assert tree.match(hashes(1, 2)).depths.tolist() == [2]
    assert tree.match(hashes(11, 12)).depths.tolist() == [0]
    tree.check()
