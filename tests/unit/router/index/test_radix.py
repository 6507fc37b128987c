"""The prefix index: depths, copies, tiers, holes, eviction."""

import numpy as np

from penstock.router.index.radix import RadixTree


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


def test_a_matched_parent_outlives_its_children():
    tree = RadixTree(4)
    tree.store(0, hashes(1, 2))
    tree.store(0, hashes(11, 12))
    tree.match(hashes(1))  # somebody else's prompt ends here
    tree.store(0, hashes(21, 22))  # 2 is the oldest leaf, then 12 is older than 1
    assert tree.match(hashes(1, 2)).depths.tolist() == [1]
    assert tree.match(hashes(11, 12)).depths.tolist() == [1]
    tree.check()


def test_a_shared_prefix_is_no_leaf():
    tree = RadixTree(5)
    tree.store(0, hashes(1, 2))
    tree.store(0, hashes(3), parent=2)
    tree.store(0, hashes(4), parent=2)
    tree.store(0, hashes(5, 6), parent=2)
    assert tree.match(hashes(1, 2, 5, 6)).depths.tolist() == [4]
    assert tree.match(hashes(1, 2, 3)).depths.tolist() == [2]
    tree.check()


def test_contradictions_are_counted_and_do_not_mislead():
    tree = RadixTree(100)
    tree.store(0, hashes(1, 2, 3))
    tree.store(1, hashes(3))  # says that it has no parent
    assert tree.stats().contradictions == 1
    assert tree.match(hashes(1, 2, 3)).depths.tolist() == [3, 0]
    tree.store(1, hashes(1))
    assert tree.match(hashes(1, 2, 3)).depths.tolist() == [3, 1]
    tree.check()
