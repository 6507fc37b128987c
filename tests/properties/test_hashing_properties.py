import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.core import hashing
from penstock.core.hashing import block_hashes, block_hashes_python, siphash128, siphash128_python

token_ids = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=300)
block_sizes = st.integers(1, 40)
keys = st.binary(min_size=16, max_size=16)
salts = st.binary(max_size=20)


@st.composite
def prompts(draw):
    """A prompt, its block size, and extras in order of position."""
    tokens = draw(token_ids)
    positions = sorted(draw(st.lists(st.integers(0, len(tokens) - 1), max_size=4))) if tokens else []
    extra = [(position, draw(st.binary(max_size=30))) for position in positions]
    return tokens, draw(block_sizes), extra


@given(st.binary(max_size=300), keys)
def test_siphash_equals_its_twin(data, key):
    assert siphash128(data, key) == siphash128_python(data, key)


@given(prompts(), salts, keys, st.sampled_from([0, 10**9]))
def test_block_hashes_equal_their_twin(prompt, salt, key, side_by_side_blocks):
    tokens, block_size, extra = prompt
    got = block_hashes(tokens, block_size, salt, extra, key=key)
    by_block = hashing._extra_by_block(extra, block_size, len(tokens))
    saved, hashing._SIDE_BY_SIDE_BLOCKS = hashing._SIDE_BY_SIDE_BLOCKS, side_by_side_blocks
    try:
        first = hashing.root_hash(block_size, salt, key=key)
        expected = block_hashes_python(hashing.as_tokens(tokens), block_size, first, by_block, key)
    finally:
        hashing._SIDE_BY_SIDE_BLOCKS = saved
    np.testing.assert_array_equal(got, expected)


@given(prompts(), token_ids)
def test_a_prefix_keeps_its_hashes_whatever_follows(prompt, more):
    tokens, block_size, extra = prompt
    short = block_hashes(tokens, block_size, extra=extra)
    np.testing.assert_array_equal(block_hashes(tokens + more, block_size, extra=extra)[: len(short)], short)


@given(token_ids, block_sizes, st.integers(0, 20))
def test_a_chain_can_be_taken_up_at_any_block(tokens, block_size, split):
    whole = block_hashes(tokens, block_size)
    split = min(split, len(whole))
    parent = tuple(whole[split - 1].tolist()) if split else None
    rest = block_hashes(tokens[split * block_size :], block_size, parent=parent)
    np.testing.assert_array_equal(rest, whole[split:])


@given(token_ids.filter(bool), block_sizes, st.data())
def test_a_changed_token_changes_its_block_and_all_that_follow(tokens, block_size, data):
    position = data.draw(st.integers(0, len(tokens) - 1))
    changed = tokens.copy()
    changed[position] ^= 1
    before, after = block_hashes(tokens, block_size), block_hashes(changed, block_size)
    block = position // block_size
    np.testing.assert_array_equal(before[:block], after[:block])
    assert not (before[block:] == after[block:]).any()


@given(token_ids.filter(bool), st.binary(min_size=1, max_size=9), st.binary(max_size=9), st.data())
def test_extras_count_by_position_and_content(tokens, content, other, data):
    position = data.draw(st.integers(0, len(tokens) - 1))
    plain = block_hashes(tokens, 1)
    pairs = {
        position: block_hashes(tokens, 1, extra=[(position, content)]),
        -1: block_hashes(tokens, 1, extra=[(position, content), (position, other)]),
    }
    seen = [plain, *pairs.values()]
    for hashes in seen:
        np.testing.assert_array_equal(hashes[:position], plain[:position])
    assert len({tuple(hashes[position].tolist()) for hashes in seen}) == len(seen)


@given(salts, salts, keys)
def test_salts_and_keys_never_share_a_block(salt, other, key):
    base = block_hashes(range(8), 8, salt)
    if salt != other:
        assert base.tolist() != block_hashes(range(8), 8, other).tolist()
    if key != hashing.DEFAULT_KEY:
        assert base.tolist() != block_hashes(range(8), 8, salt, key=key).tolist()
