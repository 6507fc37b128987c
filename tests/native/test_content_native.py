"""The native account of what a worker holds beside its Python reference."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.native import native
from penstock.core.types.events import Tier
from penstock.core.wire import pack_hashes, unpack_hashes
from penstock.runtime.events.publisher import Content, ContentPython

pytestmark = pytest.mark.skipif(native is None, reason="installed with PENSTOCK_NATIVE=OFF")

HASHES = st.integers(0, 11).map(lambda number: number * 0x1111_1111_1111_1111)
"""Few of them, so that parents also contradict each other and go in circles."""
PACKED = st.lists(HASHES, max_size=6).map(pack_hashes)
TIERS = st.sampled_from(list(Tier))
CHANGES = st.one_of(
    st.tuples(st.just("store"), PACKED, st.none() | HASHES, TIERS),
    st.tuples(st.just("remove"), PACKED, TIERS),
    st.tuples(st.just("clear")),
)


def told(content):
    """Give each block's parent and copies, having seen that parents come first, and once."""
    blocks = {}
    for packed, parent, copies in content.runs():
        before = parent
        for block_hash in unpack_hashes(packed).tolist():
            assert block_hash not in blocks
            blocks[block_hash] = (before, copies)
            before = block_hash
    return blocks


def check_order(blocks):
    place = {block_hash: index for index, block_hash in enumerate(blocks)}
    for block_hash in blocks:
        parent, seen = blocks[block_hash][0], set()
        while parent in blocks and parent not in seen:
            seen.add(parent)
            parent = blocks[parent][0]
        if block_hash not in seen and parent not in seen:  # its prefix does not go in a circle
            assert all(place[before] < place[block_hash] for before in seen)


@given(st.lists(CHANGES, max_size=30))
def test_equal_changes_leave_equal_content(changes):
    contents = Content(), ContentPython()
    for name, *arguments in changes:
        for content in contents:
            getattr(content, name)(*arguments)
            content.check()
    ours, reference = contents
    assert told(ours) == told(reference)
    assert (len(ours), ours.unknown_removals) == (len(reference), reference.unknown_removals)
    for content in contents:
        check_order(told(content))
        assert len(told(content)) == len(content)


@pytest.mark.parametrize("kind", [Content, ContentPython])
def test_a_tree_is_told_in_as_many_runs_as_it_has_ends(kind):
    content = kind()
    trunk = np.random.default_rng(0).integers(0, 2**64, 300, dtype=np.uint64)
    branches = np.random.default_rng(1).integers(0, 2**64, (5, 40), dtype=np.uint64)
    content.store(trunk, None, Tier.DEVICE)
    for branch in branches:
        content.store(branch.tobytes(), int(trunk[-1]), Tier.DEVICE)
    assert len(content.runs()) == 5
    content.remove(trunk[100:200], Tier.DEVICE)
    assert len(content) == 400
    assert len(content.runs()) == 6


@given(st.lists(CHANGES, max_size=30), st.lists(CHANGES, max_size=30), st.integers(1, 20))
def test_a_walk_tells_what_there_was_when_it_began(before, after, steps):
    for content in (Content(), ContentPython()):
        for name, *arguments in before:
            getattr(content, name)(*arguments)
        expected = told(content)
        walk = content.walk()
        said = []
        changes = iter(after)
        while not walk.is_done:
            runs = walk.next(steps)
            assert sum(len(packed) // 8 for packed, _, _ in runs) <= steps
            said += runs
            for name, *arguments in [change for change in [next(changes, None)] if change]:
                getattr(content, name)(*arguments)
                content.check()
        walked = told(SimpleNamespace(runs=lambda said=said: said))
        assert walked == expected
        check_order(walked)


@pytest.mark.parametrize("kind", [Content, ContentPython])
def test_copies_past_the_bound_do_not_count(kind):
    content = kind()
    for _ in range(4_100):
        content.store(pack_hashes([1]), None, Tier.HOST)
    assert content.runs() == [(pack_hashes([1]), None, (0, 4_095, 0, 0))]
