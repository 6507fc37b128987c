"""What of a prompt's KV is left to move once it is computed, as the router prices it."""

import numpy as np
import pytest

from penstock.router.disagg.pricing import left_to_move

BLOCK_S = np.array([0.001, 0.01, 0.1])
BLOCKS, TOKENS = 100, 400


def left_s(uncached=TOKENS, chunk=100, prefill_s=1.0):
    """Of all blocks, to each of three workers."""
    blocks_s, links_s = both_left_s(None, uncached, chunk, prefill_s)
    assert links_s is None
    return blocks_s


def both_left_s(link_s, uncached=TOKENS, chunk=100, prefill_s=1.0):
    block_s, links_s = left_to_move(
        BLOCK_S, link_s, BLOCKS, TOKENS, uncached_tokens=uncached, chunk_tokens=chunk, prefill_s=prefill_s
    )
    return BLOCKS * block_s, links_s


def test_of_a_quick_move_the_last_chunk_is_left():
    assert left_s()[0] == pytest.approx(0.1 / 4)
    assert left_s(chunk=150)[0] == pytest.approx(0.1 / 4), "the last one has 100 tokens of 400"


def test_of_a_slow_move_the_time_between_the_first_and_the_last_chunk_is_won():
    assert left_s()[2] == pytest.approx(10 - 0.75)
    assert left_s(prefill_s=0.0)[2] == pytest.approx(10)


def test_of_what_is_computed_at_once_all_is_left():
    np.testing.assert_array_equal(left_s(uncached=100), BLOCKS * BLOCK_S)
    block_s, _ = left_to_move(BLOCK_S, None, 0, 3, uncached_tokens=3, chunk_tokens=1, prefill_s=1)
    np.testing.assert_array_equal(block_s, BLOCK_S)


def test_a_link_is_set_up_while_the_chunks_of_a_prompt_are_computed():
    """The first of four chunks is there after 0.25 s of the one that all take; bytes move once the link is there, too."""
    blocks_s, links_s = both_left_s(np.array([0.5, 0.5, 2.0]))
    assert links_s == pytest.approx([0.0, 0.0, 1.0])
    assert blocks_s == pytest.approx([0.1 / 4, 1 - 0.5, 10.0])
