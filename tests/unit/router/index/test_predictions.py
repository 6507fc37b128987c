"""Guesses about workers that send no KV events: what they last, what bounds them, and what takes them back."""

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np

from penstock.router.index.predictions import Predictions
from penstock.router.index.radix import RadixTree
from penstock.sim.loop.loop import run_virtual

TTL_S = 16.0
PATH = np.arange(1, 9, dtype=np.uint64)

Scene = Callable[[RadixTree, Predictions], Awaitable[None]]


def run_scenario(scene: Scene, blocks_max: int = 3200) -> None:
    async def main() -> None:
        tree = RadixTree(10_000, 2)
        predictions = Predictions(tree, ttl_s=TTL_S, blocks_max=blocks_max)
        await scene(tree, predictions)
        predictions.check()
        tree.check()
        predictions.forget(0)
        predictions.forget(1)
        await asyncio.sleep(2 * TTL_S)
        predictions.check()

    run_virtual(main())


def depths(tree: RadixTree) -> list[int]:
    return tree.match(PATH).depths.tolist()


def test_what_was_sent_is_held_until_its_time_is_over():
    async def scene(tree: RadixTree, predictions: Predictions) -> None:
        predictions.sent(1, PATH[:5])
        assert depths(tree) == [0, 5]
        await asyncio.sleep(TTL_S)
        assert depths(tree) == [0, 5]
        await asyncio.sleep(TTL_S / 8)
        assert depths(tree) == [0, 0]
        assert tree.stats().pairs == 0

    run_scenario(scene)


def test_sending_again_makes_it_last_and_the_rest_of_it_goes():
    async def scene(tree: RadixTree, predictions: Predictions) -> None:
        predictions.sent(0, PATH)
        await asyncio.sleep(TTL_S / 2)
        predictions.sent(0, PATH[:3])
        await asyncio.sleep(TTL_S * 0.75)
        assert depths(tree) == [3, 0]

    run_scenario(scene)


def test_sending_twice_in_one_interval_notes_only_what_is_new():
    async def scene(tree: RadixTree, predictions: Predictions) -> None:
        predictions.sent(0, PATH[:3])
        predictions.sent(0, PATH)
        predictions.sent(0, PATH[:5])
        assert depths(tree) == [8, 0]
        assert sum(len(held.hashes) // 8 for held in tree.snapshot(0)) == len(PATH), "one copy of each block"
        await asyncio.sleep(1.125 * TTL_S)
        assert tree.stats().pairs == 0

    run_scenario(scene)


def test_past_the_bound_the_oldest_is_forgotten_first():
    async def scene(tree: RadixTree, predictions: Predictions) -> None:
        predictions.sent(0, PATH)
        for start in range(100, 500, 10):
            predictions.sent(1, np.arange(start, start + 10, dtype=np.uint64))
            predictions.check()
        assert depths(tree) == [0, 0]
        latest = np.arange(490, 500, dtype=np.uint64)
        assert tree.match(latest).depths.tolist() == [0, 10]
        assert tree.stats().pairs <= 320

    run_scenario(scene, blocks_max=320)


def test_of_a_prompt_larger_than_the_bound_allows_the_first_part_is_held():
    async def scene(tree: RadixTree, predictions: Predictions) -> None:
        predictions.sent(0, PATH)
        assert depths(tree) == [3, 0]

    run_scenario(scene, blocks_max=3 * 32)


def test_a_worker_that_is_gone_leaves_nothing_to_take_back():
    async def scene(tree: RadixTree, predictions: Predictions) -> None:
        predictions.sent(0, PATH)
        predictions.sent(1, PATH)
        predictions.forget(0)
        tree.clear(0)
        tree.store(0, PATH)  # the slot's next worker does say what it holds
        await asyncio.sleep(2 * TTL_S)
        assert depths(tree) == [8, 0]
        assert tree.stats().unknown_removals == 0

    run_scenario(scene)
