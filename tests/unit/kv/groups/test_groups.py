"""Groups of layers: what each needs of a prefix, and the names of their blocks in tiers."""

import numpy as np
import pytest

from penstock.core.hashing import block_hashes
from penstock.kv.groups.group import GroupKind, KvGroup
from penstock.kv.groups.groups import KvGroups

SIZE = 16
FULL = KvGroup(GroupKind.FULL, ("full",), 4096)
MLA = KvGroup(GroupKind.MLA, ("latent",), 576)
HASHES = block_hashes(np.arange(6 * SIZE, dtype=np.int32), SIZE)


def window(tokens: int) -> KvGroup:
    return KvGroup(GroupKind.SLIDING_WINDOW, (f"window-{tokens}",), 4096, tokens)


@pytest.mark.parametrize(
    ("tokens", "blocks"),
    [(1, 0), (2, 1), (SIZE, 1), (SIZE + 1, 1), (SIZE + 2, 2), (2 * SIZE + 1, 2), (128, 8)],
)
def test_the_next_token_attends_to_a_window_less_itself(tokens, blocks):
    assert window(tokens).needed_blocks(SIZE) == blocks


@pytest.mark.parametrize(("kind", "tokens"), [(GroupKind.FULL, 8), (GroupKind.SLIDING_WINDOW, None)])
def test_a_window_is_that_of_a_sliding_window(kind, tokens):
    with pytest.raises(ValueError, match="window_tokens"):
        KvGroup(kind, (), 1, tokens)


def test_the_first_group_has_the_prompts_hashes_and_no_two_groups_share_a_name():
    tables = KvGroups([window(64), FULL, window(33)], SIZE)
    names = [place.names(HASHES) for place in tables.places]
    assert np.array_equal(names[0], HASHES)
    assert len({each.tobytes() for group in names for each in group}) == 3 * len(HASHES)
    assert len(set(np.concatenate(names)[:, 0].tolist())) == 3 * len(HASHES), (
        "low halves too, which events have"
    )


def test_a_stored_block_tells_its_group_by_its_parent():
    tables = KvGroups([FULL, window(64), window(33)], SIZE)
    chain = tables.chain(HASHES[3:4], tables.others)[:, 0].tolist()
    assert [tables.place_of(each, parent) for each, parent in zip(chain, [None, *chain], strict=False)] == [
        0,
        1,
        2,
    ]
    assert tables.place_of(int(HASHES[4, 0]), int(HASHES[3, 0])) == 0
