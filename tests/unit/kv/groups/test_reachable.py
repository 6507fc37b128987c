"""Blocks that lead to a prefix that a request can go on after."""

from penstock.kv.groups.reachable import ReachableBlocks


def prompt(blocks: ReachableBlocks, length: int) -> None:
    for block in range(1, length + 1):
        blocks.store(block, block - 1 or None)


def test_a_window_that_comes_before_its_prefix_counts_once_that_is_there() -> None:
    blocks = ReachableBlocks([2])
    blocks.store_other(0, 2)
    blocks.store(2, 1)
    blocks.store_other(0, 1)
    assert blocks.take() == ([], [])
    blocks.store(1, None)
    assert blocks.take() == ([(1, None), (2, 1)], [])


def test_what_a_window_loses_takes_back_the_blocks_behind_the_last_length_that_is_held() -> None:
    blocks = ReachableBlocks([2])
    prompt(blocks, 8)
    assert blocks.take() == ([], [])
    for block in (2, 3, 7, 8):
        blocks.store_other(0, block)
    assert blocks.take()[0] == [(block, block - 1 or None) for block in range(1, 9)]
    assert blocks.remove_other(0, 7)
    assert sorted(blocks.take()[1]) == [4, 5, 6, 7, 8]
    assert not blocks.remove_other(0, 7)
    assert blocks.remove_other(0, 2)
    assert sorted(blocks.take()[1]) == [1, 2, 3]


def test_a_block_whose_continuation_went_leads_nowhere() -> None:
    blocks = ReachableBlocks([1])
    prompt(blocks, 3)
    blocks.store_other(0, 3)
    blocks.take()
    blocks.remove(3)
    assert sorted(blocks.take()[1]) == [1, 2, 3]
    blocks.store(3, 2)
    assert blocks.take()[0] == [(1, None), (2, 1), (3, 2)]


def test_a_second_group_that_turns_up_takes_back_what_it_has_not() -> None:
    blocks = ReachableBlocks()
    prompt(blocks, 3)
    blocks.take()
    blocks.add_group(1)
    assert sorted(blocks.take()[1]) == [1, 2, 3]
    blocks.store_other(0, 2)
    assert blocks.take() == ([(1, None), (2, 1)], [])


def test_nothing_is_kept_of_blocks_that_are_gone() -> None:
    blocks = ReachableBlocks([2])
    prompt(blocks, 4)
    blocks.store_other(0, 4)
    for block in (1, 2, 3, 4):
        blocks.remove(block)
    blocks.remove_other(0, 4)
    assert len(blocks) == 0
