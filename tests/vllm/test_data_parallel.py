"""Two data-parallel ranks of one vLLM are two routing targets of one registration."""

import asyncio
import contextlib
from collections.abc import Callable

import psutil
import pytest

from penstock.core.ids import RequestId
from penstock.core.types.requests import Request, SamplingParams
from penstock.core.wire import pack_tokens
from penstock.engine.registry import create_engine
from penstock.engine.spec import EngineSpec
from penstock.router.config import RouterConfig
from penstock.router.dispatch.dispatcher import Dispatcher
from tests.support.cluster import MemoryCluster, small_card
from tests.vllm.conftest import BLOCK, TIMEOUT_S
from tests.vllm.indexed import prompt, reusable

pytestmark = pytest.mark.nightly

BLOCKS = 14
EVENTS_S = 1.0
"""After so long without a request all events are here."""


class Ranks:
    """A cluster of one worker, `w1`, on a vLLM with two ranks."""

    def __init__(self, cluster: MemoryCluster, dispatcher: Dispatcher) -> None:
        self.cluster = cluster
        self.dispatcher = dispatcher
        self.number = 0

    async def ask(self, ids: list[int], tokens: int = 4) -> tuple[str, int]:
        """Send a prompt; give the target that answered, and the prompt tokens that it had cached."""
        self.number += 1
        request = Request(
            request_id=RequestId(f"r{self.number}"),
            model="tiny",
            token_ids=pack_tokens(ids),
            sampling=SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True),
            salt=b"tiny-1",
        )
        cached = emitted = 0
        async with self.dispatcher.open(request) as stream:
            async for delta in stream:
                cached = delta.cached_tokens or cached
                emitted += len(delta.token_ids) // 4
        assert emitted == tokens
        return self.dispatcher.explain(request.request_id)[-1].worker, cached

    def held(self) -> dict[str, int]:
        """Count the blocks that the index has of each target."""
        return {view.name: view.indexed_blocks for view in self.dispatcher.workers()}


def test_ranks_are_routed_to_as_workers_are(spec_of: Callable[..., EngineSpec]) -> None:
    async def main() -> None:
        engine = create_engine(
            "vllm", spec_of(device="cpu:0", data_parallel=2, kv_blocks=BLOCKS, context_length=256)
        )
        config = RouterConfig(policy="kv")
        async with (
            asyncio.timeout(TIMEOUT_S),
            MemoryCluster() as cluster,
            cluster.dispatcher(config) as dispatcher,
        ):
            await cluster.start("w1", engine, card=small_card(block_size=BLOCK))
            assert not cluster.errors
            await dispatcher.serving()
            ranks = Ranks(cluster, dispatcher)
            await load_is_balanced_and_prompts_go_where_they_are_cached(ranks)
            await a_reset_clears_each_rank(ranks)
            await the_death_of_a_core_removes_both(ranks)

    asyncio.run(main())


async def load_is_balanced_and_prompts_go_where_they_are_cached(ranks: Ranks) -> None:
    first, second = prompt(100, 1), prompt(100, 2)
    (one, cold), (other, _) = await asyncio.gather(ranks.ask(first), ranks.ask(second))
    assert {one, other} == {"w1/0", "w1/1"}
    assert cold == 0
    await asyncio.sleep(EVENTS_S)
    assert ranks.held() == {"w1/0": 3, "w1/1": 3}, "each target has the blocks of its rank alone"
    for _ in range(3):
        assert await ranks.ask(first) == (one, reusable(first))
        assert await ranks.ask(second) == (other, reusable(second))
    assert (await ranks.ask(first + prompt(20, 3))) == (one, 96)
    for view in ranks.dispatcher.workers():
        assert view.load is not None
        assert view.load["total_blocks"] == BLOCKS, "of one rank"
        assert view.load["generated_tokens"] == (20 if view.name == one else 16)
        assert view.load["prefix_hit_tokens"] == 96 * (4 if view.name == one else 3)
    ranks.cluster.worker("w1").check()


async def a_reset_clears_each_rank(ranks: Ranks) -> None:
    assert await ranks.cluster.engine("w1")._core.reset_prefix_cache_async()
    await asyncio.gather(
        ranks.ask(prompt(40, 7)), ranks.ask(prompt(40, 8))
    )  # a rank tells with its next step
    await asyncio.sleep(EVENTS_S)
    assert ranks.held() == {"w1/0": 1, "w1/1": 1}


async def the_death_of_a_core_removes_both(ranks: Ranks) -> None:
    assert {view.name for view in ranks.dispatcher.workers()} == {"w1/0", "w1/1"}
    cores = [child for child in psutil.Process().children(recursive=True) if "EngineCore" in _name(child)]
    assert len(cores) >= 2, "one for each rank"
    cores[0].kill()
    changed = asyncio.Event()
    with ranks.dispatcher._shared.fleet.changes.telling(changed.set):
        while ranks.dispatcher.workers():
            changed.clear()
            await changed.wait()
    await asyncio.wait([ranks.cluster._members["w1"].task])  # it closes its engine
    assert "died" in ranks.cluster.errors["w1"].message


def _name(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        return " ".join([process.name(), *process.cmdline()])
    return ""
