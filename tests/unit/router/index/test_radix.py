"""The prefix index: depths, copies, tiers, holes, eviction."""

import numpy as np

from penstock.core.types.events import Tier
from penstock.router.index.radix import RadixTree


def hashes(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


def test_depth_is_the_leading_run_each_worker_holds():
    tree = RadixTree(100, num_slots=3)
    tree.store(0, hashes(1, 2, 3))
    tree.store(1, hashes(1, 2))
    assert tree.match(hashes(1, 2, 3, 4)).depths.tolist() == [3, 2, 0]
    assert tree.match(hashes(2, 3)).depths.tolist() == [2, 1, 0]
    assert tree.match(hashes(9)).depths.tolist() == [0, 0, 0]
    assert tree.match(hashes()).depths.tolist() == [0, 0, 0]
    assert tree.match(hashes(1, 2, 3)).depths.dtype == np.int32
    tree.check()


def test_nothing_after_a_hole_counts():
    tree = RadixTree(100)
    tree.store(0, hashes(1, 2, 3))
    tree.remove(0, hashes(2))
    assert tree.match(hashes(1, 2, 3)).depths.tolist() == [1]
    tree.store(0, hashes(2), parent=1)
    assert tree.match(hashes(1, 2, 3)).depths.tolist() == [3]
    tree.check()


def test_copies_are_removed_one_by_one_and_by_tier():
    tree = RadixTree(100)
    tree.store(0, hashes(1))
    tree.store(0, hashes(1))
    tree.store(0, hashes(1), tier=Tier.HOST)
    for tier in (Tier.DEVICE, Tier.DEVICE):
        tree.remove(0, hashes(1), tier=tier)
        assert tree.match(hashes(1)).depths.tolist() == [1]
    tree.remove(0, hashes(1), tier=Tier.DEVICE)  # no such copy
    assert tree.match(hashes(1)).depths.tolist() == [1]
    tree.remove(0, hashes(1), tier=Tier.HOST)
    assert tree.match(hashes(1)).depths.tolist() == [0]
    assert tree.stats().unknown_removals == 1
    assert tree.stats().pairs == tree.stats().nodes == 0


def test_clear_forgets_one_worker_only():
    tree = RadixTree(100)
    tree.store(0, hashes(1, 2))
    tree.store(70, hashes(1, 2))
    tree.clear(0)
    depths = tree.match(hashes(1, 2)).depths
    assert len(depths) == 71
    assert depths[[0, 70]].tolist() == [0, 2]
    assert tree.held_blocks(0) == 0
    assert tree.held_blocks(70) == 2
    tree.clear(500)  # never seen
    tree.check()


def test_many_holders_drop_out_at_the_same_block():
    tree = RadixTree(10_000, num_slots=100)
    for slot in range(100):
        tree.store(slot, hashes(1, 2, 3) if slot % 3 else hashes(1, 2))
    expected = [3 if slot % 3 else 2 for slot in range(100)]
    assert tree.match(hashes(1, 2, 3)).depths.tolist() == expected
    assert tree.match(hashes(1, 2, 3, 4)).depths.tolist() == expected


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


def test_parents_in_a_circle_do_not_break_the_bound():
    tree = RadixTree(3)
    tree.store(0, hashes(1), parent=2)
    tree.store(0, hashes(2), parent=1)
    tree.store(1, hashes(1, 2), parent=2)
    assert tree.stats().pairs <= 3
    tree.check()


def test_tiers_count_where_each_block_lies_at_best():
    tree = RadixTree(100, num_slots=2)
    tree.store(0, hashes(1, 2, 3))
    tree.store(1, hashes(1), tier=Tier.HOST)
    tree.store(1, hashes(2), parent=1, tier=Tier.DISK)
    tree.store(1, hashes(2), parent=1)
    tree.store(1, hashes(3), parent=2, tier=Tier.OBJECT)
    match = tree.match(hashes(1, 2, 3))
    assert match.depths.tolist() == [3, 3]
    assert match.tiers.T.tolist() == [[3, 0, 0, 0], [1, 1, 0, 1]]
    tree.remove(1, hashes(2))
    assert tree.match(hashes(1, 2)).tiers.T.tolist() == [[2, 0, 0, 0], [0, 1, 1, 0]]
    tree.clear(1)
    assert tree.match(hashes(1, 2)).tiers.T.tolist() == [[2, 0, 0, 0], [0, 0, 0, 0]]
    tree.check()


def test_a_snapshot_replayed_gives_the_same_tree():
    tree, copy = RadixTree(100), RadixTree(100)
    tree.store(0, hashes(1, 2, 3))
    tree.store(0, hashes(2, 3), parent=1)
    tree.store(5, hashes(3), parent=2, tier=Tier.DISK)
    tree.store(5, hashes(7))
    for held in tree.snapshot():
        copy.store(*held)
    assert sorted(copy.snapshot()) == sorted(tree.snapshot())
    assert {held.worker for held in tree.snapshot(5)} == {5}
    assert tree.hashes_of(0).tolist() == [1, 2, 3]
    assert tree.hashes_of(9).tolist() == []


def test_contradictions_are_counted_and_do_not_mislead():
    tree = RadixTree(100)
    tree.store(0, hashes(1, 2, 3))
    tree.store(1, hashes(3))  # says that it has no parent
    assert tree.stats().contradictions == 1
    assert tree.match(hashes(1, 2, 3)).depths.tolist() == [3, 0]
    tree.store(1, hashes(1))
    assert tree.match(hashes(1, 2, 3)).depths.tolist() == [3, 1]
    tree.check()


def test_several_prompts_at_once():
    tree = RadixTree(100, num_slots=2)
    tree.store(1, hashes(1, 2))
    match = tree.match_many([hashes(1, 2, 3), hashes(9), hashes(1)])
    assert match.depths.tolist() == [[0, 2], [0, 0], [0, 1]]
    assert match.tiers.shape == (3, 4, 2)
    assert match.tiers[:, 0].tolist() == match.depths.tolist()
