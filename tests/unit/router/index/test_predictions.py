"""Guesses about workers that send no KV events: what they last, what bounds them, and what takes them back."""

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np

from penstock.router.index.predictions import Predictions
from penstock.router.index.radix import RadixTree
from penstock.sim.loop.loop import run_virtual
from tests.support.scenes import scenes

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


scenario = scenes(run_scenario, 2)


def depths(tree: RadixTree) -> list[int]:
    return tree.match(PATH).depths.tolist()


@scenario()
async def test_sending_twice_in_one_interval_notes_only_what_is_new(tree, predictions):
    predictions.sent(0, PATH[:3])
    predictions.sent(0, PATH)
    predictions.sent(0, PATH[:5])
    assert depths(tree) == [8, 0]
    assert sum(len(held.hashes) // 8 for held in tree.snapshot(0)) == len(PATH), "one copy of each block"
    await asyncio.sleep(1.125 * TTL_S)
    assert tree.stats().pairs == 0


@scenario(blocks_max=320)
async def test_past_the_bound_the_oldest_is_forgotten_first(tree, predictions):
    predictions.sent(0, PATH)
    for start in range(100, 500, 10):
        predictions.sent(1, np.arange(start, start + 10, dtype=np.uint64))
        predictions.check()
    assert depths(tree) == [0, 0]
    latest = np.arange(490, 500, dtype=np.uint64)
    assert tree.match(latest).depths.tolist() == [0, 10]
    assert tree.stats().pairs <= 320


@scenario(blocks_max=3 * 32)
async def test_of_a_prompt_larger_than_the_bound_allows_the_first_part_is_held(tree, predictions):
    predictions.sent(0, PATH)
    assert depths(tree) == [3, 0]
