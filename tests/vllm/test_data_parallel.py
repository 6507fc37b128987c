"""Two data-parallel ranks are one worker; a request goes to the rank that has its prompt."""

from collections.abc import Callable

import pytest

from penstock.core.types.events import AllBlocksCleared
from penstock.engine.spec import EngineSpec
from tests.vllm.conftest import Running
from tests.vllm.indexed import KEY, Indexed, prompt, reusable

BLOCKS = 14


@pytest.fixture(scope="module")
def indexed(started: Callable[[EngineSpec], Running], spec_of: Callable[..., EngineSpec]) -> Indexed:
    spec = spec_of(data_parallel=2, kv_blocks=BLOCKS, context_length=256, hash_key=KEY)
    return Indexed(started(spec))


def held_by_rank(indexed: Indexed) -> list[int]:
    return [subscriber.num_blocks for subscriber in indexed.running.engine._events._subscribers]


def test_prompts_at_the_same_time_go_to_different_ranks(indexed: Indexed) -> None:
    first, second = prompt(100, 1), prompt(100, 2)
    assert indexed.run(first, second) == [0, 0]
    assert held_by_rank(indexed) == [3, 3]
    assert indexed.known(first) == indexed.known(second) == 96
    load = indexed.running.load()
    assert (load.total_blocks, load.cached_blocks) == (2 * BLOCKS, 6)
    indexed.check()


def test_prompts_go_where_they_are_cached(indexed: Indexed) -> None:
    first, second = prompt(100, 1), prompt(100, 2)
    for _ in range(3):
        assert indexed.run(first) == [reusable(first)]
        assert indexed.run(second) == [reusable(second)]
    assert indexed.run(first, first + prompt(20, 3), second) == [96, 96, 96]
    assert indexed.run(first, salt=b"other") == [0]
    assert indexed.known(first, b"other") == 96
    assert indexed.run(first, salt=b"other") == [96]
    indexed.check()


def test_a_reset_of_the_ranks_clears_all(indexed: Indexed) -> None:
    async def reset() -> None:
        assert await indexed.running.engine._core.reset_prefix_cache_async()

    first, second = prompt(100, 1), prompt(100, 2)
    indexed.running.do(reset())
    indexed.run(prompt(40, 7), prompt(40, 8))  # ranks tell of it with their next step
    assert indexed.known(first) == indexed.known(second) == 0
    assert held_by_rank(indexed) == [1, 1]
    assert AllBlocksCleared not in indexed.kinds, "it would clear the other rank too"
    indexed.check()
