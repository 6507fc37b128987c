"""Names of the blocks that a transfer moves of a model with several groups of layers."""

import numpy as np

from penstock.core.hashing import block_hashes
from penstock.kv.groups import GroupKind, KvGroup, KvGroups
from penstock.kv.pool import BlockPool
from penstock.kv.windows import WindowPrefixes
from penstock.seams import KvNames

SIZE = 4
HASHES = block_hashes(np.arange(6 * SIZE, dtype=np.int32), SIZE)


def prefixes(*windows):
    whole = KvGroup(GroupKind.FULL, (), 1)
    others = [KvGroup(GroupKind.SLIDING_WINDOW, (), 1, window) for window in windows]
    groups = KvGroups([whole, *others], SIZE)
    pool = BlockPool(64, SIZE)
    return groups, pool, WindowPrefixes(pool, groups)


def test_a_prompts_blocks_come_first_and_then_the_last_windows_by_position():
    groups, _, windows = prefixes(9, 5)
    names = windows.moved(HASHES)
    wide, narrow = groups.others
    assert (wide.start(6), narrow.start(6)) == (4, 5)
    expected = [*HASHES, *wide.names(HASHES[4:5]), *wide.names(HASHES[5:]), *narrow.names(HASHES[5:])]
    assert names.hashes.tolist() == np.array(expected).tolist()
    assert names.num_leading == 6
    lows = HASHES[:, 0].tolist()
    assert list(names.chains(0, 9)) == [(0, 6, None), (6, 7, lows[4]), (7, 9, lows[5])]


def test_chains_of_a_part_begin_with_their_parent():
    _, _, windows = prefixes(9, 5)
    names = windows.moved(HASHES)
    assert list(names.chains(2, 4)) == [(2, 4, int(HASHES[1, 0]))]
    assert list(names.chains(8, 9)) == [(8, 9, int(names.hashes[7, 0]))], (
        "the second window's block hangs on the first's"
    )
    assert list(names.chains(4, 4)) == []


def test_one_table_moves_the_prompts_blocks_alone():
    names = KvNames(HASHES, np.zeros(0, np.uint64), len(HASHES))
    assert list(names.chains(0, 6)) == [(0, 6, None)]
    assert list(names.chains(3, 6)) == [(3, 6, int(HASHES[2, 0]))]
