"""Predictions under any order of requests, losses and time: bounded, and equal to a model that dates every block."""

import asyncio

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.router.indexer import Predictions
from penstock.router.radix import RadixTree
from penstock.sim.loop import run_virtual

TTL_S, SLOTS = 16.0, 3

sends = st.tuples(st.integers(0, SLOTS - 1), st.integers(0, 3), st.integers(0, 12))
moves = st.one_of(sends, st.floats(0.0, 2 * TTL_S), st.sampled_from(("lost 0", "lost 1")))


def path_of(family: int, length: int) -> list[int]:
    """Name the blocks of one of four prompts; two of them share their first five."""
    shared = family // 2 * 100
    return [1 + shared + index + (50 * (family % 2) if index >= 5 else 0) for index in range(length)]


@given(st.lists(moves, max_size=40))
def test_every_block_lasts_its_time_and_hardly_longer(script: list[object]) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        tree = RadixTree(None, SLOTS)
        predictions = Predictions(tree, ttl_s=TTL_S, blocks_max=100_000)
        sent_s: dict[tuple[int, int], float] = {}
        for move in script:
            match move:
                case float():
                    await asyncio.sleep(move)
                case str():
                    slot = int(move.removeprefix("lost "))
                    predictions.forget(slot)
                    tree.clear(slot)
                    sent_s = {key: at for key, at in sent_s.items() if key[0] != slot}
                case (slot, family, length):
                    path = path_of(family, length)
                    predictions.sent(slot, np.array(path, dtype=np.uint64))
                    sent_s.update(dict.fromkeys(((slot, block) for block in path), loop.time()))
            predictions.check()
            tree.check()
            held = {(slot, block) for slot in range(SLOTS) for block in tree.hashes_of(slot).tolist()}
            ages = {key: loop.time() - at for key, at in sent_s.items()}
            assert {key for key, age in ages.items() if age < TTL_S} <= held, "until its time is over"
            assert held <= {key for key, age in ages.items() if age <= TTL_S * 33 / 32 + 1e-6}, (
                "and not much longer"
            )
        await asyncio.sleep(2 * TTL_S)
        assert tree.stats().pairs == 0
        assert tree.stats().unknown_removals == 0

    run_virtual(main())


@given(st.lists(sends, max_size=60), st.integers(1, 40))
def test_never_past_the_bound(script: list[tuple[int, int, int]], blocks_max: int) -> None:
    async def main() -> None:
        tree = RadixTree(None, SLOTS)
        predictions = Predictions(tree, ttl_s=TTL_S, blocks_max=blocks_max)
        for slot, family, length in script:
            predictions.sent(slot, np.array(path_of(family, length), dtype=np.uint64))
            predictions.check()
            assert tree.stats().pairs <= blocks_max
        await asyncio.sleep(2 * TTL_S)

    run_virtual(main())
