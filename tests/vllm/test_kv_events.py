"""The prefix index of Penstock, fed with vLLM's events, knows what vLLM finds in its cache."""

from collections.abc import Callable

import pytest

from penstock.core.types.events import AllBlocksCleared, BlockRemoved
from penstock.core.wire import hash_list
from penstock.engine.spec import EngineSpec
from tests.vllm.conftest import Running
from tests.vllm.indexed import KEY, Indexed, prompt, reusable

BLOCKS = 14


@pytest.fixture(scope="module")
def indexed(started: Callable[[EngineSpec], Running], spec_of: Callable[..., EngineSpec]) -> Indexed:
    return Indexed(started(spec_of(kv_blocks=BLOCKS, context_length=256, hash_key=KEY)))


def test_copies_of_a_block_are_gone_with_the_last(indexed: Indexed) -> None:
    """A prompt of whole blocks: vLLM computes and keeps its last block again each time."""
    ids = prompt(64, 4)
    assert indexed.run(ids) == [0]
    for _ in range(2):
        assert indexed.known(ids) == 64
        assert indexed.run(ids) == [reusable(ids)] == [32]
    removed_before = BlockRemoved in indexed.kinds
    for seed in range(10, 16):
        assert indexed.run(prompt(150, seed)) == [0]
        indexed.check()
        again = indexed.known(ids)
        assert again in {0, 32, 64}
    assert BlockRemoved in indexed.kinds or removed_before
    assert indexed.known(ids) == 0
    assert indexed.run(ids) == [0]


def test_whatever_the_history_the_index_is_right(indexed: Indexed) -> None:
    hits = 0
    for turn in range(24):
        ids = prompt(40 + turn * 37 % 120, turn * 7 % 3)
        salt = b"ab" if turn % 3 == 0 else b""
        foreseen = min(indexed.known(ids, salt), reusable(ids))
        others = [prompt(70, 50 + turn), prompt(70, 50 + turn)] if turn % 8 == 0 else []
        cached = indexed.run(ids, salt=salt, tokens=1 + turn % 40)
        assert cached == [foreseen]
        if others:
            indexed.run(*others)
        hits += foreseen > 0
        indexed.check()
    assert hits > 3


def test_a_reset_clears(indexed: Indexed) -> None:
    ids = prompt(100, 6)
    indexed.run(ids)
    assert indexed.known(ids) == 96

    async def reset() -> None:
        assert await indexed.running.engine._core.reset_prefix_cache_async()

    indexed.running.do(reset())
    assert indexed.run(prompt(40, 7)) == [0]  # vLLM tells of the reset with its next step
    assert AllBlocksCleared in indexed.kinds
    assert indexed.known(ids) == 0
    assert indexed.run(ids) == [0]
    assert indexed.known(ids) == 96
    indexed.check()


def test_nothing_was_left_out(indexed: Indexed) -> None:
    (reader,) = indexed.running.engine._events.readers
    assert not reader.omissions
    assert reader.num_blocks == len(hash_list(indexed.tree.hashes_of(0)))
    assert indexed.running.load().cached_blocks == reader.num_blocks
