"""The native prefix index where the state machine does not reach: sizes, odd input, threads."""

import threading

import numpy as np
import pytest

from penstock.core.hashing import block_hashes
from penstock.core.native import native
from penstock.core.types.events import Tier
from penstock.router.radix import RadixTree, RadixTreePython

pytestmark = pytest.mark.skipif(native is None, reason="installed with PENSTOCK_NATIVE=OFF")


def random_hashes(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**64, count, dtype=np.uint64)


def test_long_chains_and_many_workers_equal_the_twin():
    ours, reference = RadixTree(None, 300), RadixTreePython(None, 300)
    chain = random_hashes(500)
    lengths = np.random.default_rng(1).integers(0, 501, 300)
    for tree in (ours, reference):
        for worker, length in enumerate(lengths.tolist()):
            tree.store(worker, chain[:length])
            if worker % 7 == 0:
                tree.remove(worker, chain[length // 3 : length // 2])  # a hole
            if worker % 5 == 0:
                tree.store(worker, chain[:length:1], tier=Tier.HOST)
    for query in (chain, chain[:1], chain[:250], chain[40:90]):
        np.testing.assert_array_equal(ours.match(query).depths, reference.match(query).depths)
        np.testing.assert_array_equal(ours.match(query).tiers, reference.match(query).tiers)
    ours.check()


def test_eviction_of_many_leaves_equals_the_twin():
    ours, reference = RadixTree(20_000, 4), RadixTreePython(20_000, 4)
    prompts = random_hashes(6_000 * 8).reshape(-1, 8)
    for index, prompt in enumerate(prompts):
        for tree in (ours, reference):
            tree.store(index % 4, prompt)
            if index % 3 == 0:
                tree.match(prompts[index // 2])
    assert ours.stats()[:-1] == reference.stats()[:-1]
    assert ours.stats().evicted_pairs > 20_000
    np.testing.assert_array_equal(
        ours.match_many(list(prompts)).depths, reference.match_many(list(prompts)).depths
    )
    ours.check()


def test_a_cleared_worker_is_ignored_at_once_and_reclaimed_by_as_much_as_was_asked_for():
    tree = RadixTree(None, 2)
    hashes = random_hashes(50_000)
    tree.store(0, hashes)
    tree.store(1, hashes[:10])
    tree.clear(0)
    assert tree.match(hashes).depths.tolist() == [0, 10]
    assert (tree.held_blocks(0), tree.stats().pairs, tree.stats().nodes) == (0, 10, 50_000)
    calls = 0
    more = True
    while more:
        before = tree.stats().nodes
        more = tree.reclaim(1000)
        calls += 1
        assert before - tree.stats().nodes <= 1016
    assert tree.stats().nodes == 10
    assert 45 <= calls <= 60
    tree.check()


def test_what_is_stored_again_while_it_is_reclaimed_stays():
    tree, reference = RadixTree(None, 4), RadixTreePython(None, 4)
    hashes = random_hashes(5_000)
    for each in (tree, reference):
        for worker in range(3):
            each.store(worker, hashes)
        for _ in range(3):  # tenants come and go before the first is reclaimed
            for worker in range(3):
                each.clear(worker)
                each.reclaim(500)
                each.store(worker, hashes[: 1000 * (worker + 1)])
    while tree.reclaim(500):
        tree.check()
    assert tree.stats()[:-1] == reference.stats()[:-1]
    np.testing.assert_array_equal(tree.match(hashes).depths, reference.match(hashes).depths)


def test_a_block_with_many_children_costs_no_more_than_others():
    """Its holders' shares are counted as they change; the check compares them with the children there are."""
    tree, reference = RadixTree(None, 3), RadixTreePython(None, 3)
    hub, leaves = random_hashes(3), random_hashes(500, 1)
    for each in (tree, reference):
        for worker in range(3):
            each.store(worker, hub)
            for leaf in leaves[worker * 100 : worker * 100 + 200]:
                each.store(worker, leaf.reshape(1), parent=int(hub[-1]))
        each.remove(1, hub[-1:])
        each.clear(2)
        for leaf in leaves[:180]:
            each.remove(0, leaf.reshape(1))
    while tree.reclaim(100):
        tree.check()
    for query in [np.append(hub, leaf) for leaf in leaves]:
        np.testing.assert_array_equal(tree.match(query).depths, reference.match(query).depths)
    assert tree.stats()[:-1] == reference.stats()[:-1]


def test_hashes_come_as_arrays_of_any_stride_or_as_bytes():
    tokens = np.arange(64, dtype=np.int32)
    hashes = block_hashes(tokens, 8)
    tree = RadixTree(None)
    tree.store(0, hashes[:, 0])
    column = np.ascontiguousarray(hashes[:, 0])
    packed = column.tobytes()
    shifted = memoryview(b"x" + packed)[1:]
    backwards = column[::-1][::-1]
    for query in (hashes[:, 0], column, packed, bytearray(packed), shifted, backwards):
        assert tree.match(query).depths.tolist() == [8]
    assert tree.match_tokens(tokens, 8).depths.tolist() == [8]
    assert tree.match_tokens(tokens.tobytes(), 8).depths.tolist() == [8]
    assert tree.match_tokens(tokens, 8, b"salt").depths.tolist() == [0]
    assert tree.match_many([]).depths.shape == (0, 1)
    assert tree.match_many([]).tiers.shape == (0, 4, 1)


NO_SLOT = "worker: must be a slot from 0 to 65534, got"


@pytest.mark.parametrize("tree", [RadixTree(None), RadixTreePython(None)], ids=["native", "reference"])
@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda tree: tree.store(-1, b""), (TypeError, ValueError), None),
        (lambda tree: tree.store(0, [1, 2]), (TypeError, AttributeError), None),
        (lambda tree: tree.store(0, np.zeros(2, dtype=np.int64)), TypeError, None),
        (lambda tree: tree.store(0, np.zeros((2, 2), dtype=np.uint64)), TypeError, None),
        (lambda tree: tree.match(np.zeros(2, dtype=np.float64)), TypeError, None),
        (lambda tree: tree.match(b"1234567"), ValueError, None),
        (lambda tree: tree.store(0, b"", tier="tape"), (ValueError, KeyError), None),
        (lambda tree: tree.match_tokens([1, 2], 0), ValueError, None),
        (lambda tree: tree.match_tokens([1, 2], 1, key=b"short"), ValueError, None),
        (lambda tree: tree.store(65_535, b""), ValueError, f"{NO_SLOT} 65535; give each"),
        (lambda tree: tree.remove(1 << 20, b""), ValueError, f"{NO_SLOT} 1048576; give each"),
        (lambda tree: tree.grow(65_536), ValueError, "num_slots: must be <= 65535, got 65536; divide the"),
    ],
)
def test_wrong_arguments_raise(tree, call, error, said):
    with pytest.raises(error, match=said):
        call(tree)
    tree.check()


def test_long_calls_let_other_threads_run(others_run_beside):
    tree = RadixTree(None)
    hashes = random_hashes(100_000)
    assert others_run_beside(lambda: tree.store(0, hashes))


def test_readers_beside_a_writer_see_whole_events():
    """A worker holds all of a prompt or nothing, whenever one looks."""
    tree = RadixTree(None, 8)
    prompts = [random_hashes(3000, seed) for seed in range(4)]
    ended = threading.Event()
    wrong = []

    def read():
        while not ended.is_set():
            depths = tree.match_many(prompts).depths
            wrong.extend(depths[(depths != 0) & (depths != 3000)].tolist())

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for turn in range(150):
        prompt = prompts[turn % 4]
        tree.store(turn % 8, prompt)
        tree.remove((turn + 3) % 8, prompts[(turn + 1) % 4])
        if turn % 10 == 0:
            tree.clear(turn % 8)
    ended.set()
    for reader in readers:
        reader.join()
    assert wrong == []
    tree.check()
