"""What other workers have cached of a prompt is priced beside prefill workers too: for whoever is to compute the prompt."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from penstock.core.types.instances import Role
from penstock.router.config import DisaggConfig, RouterConfig
from penstock.router.explain.replay import Replay
from penstock.worker.config import KvTransferConfig, WorkerConfig
from tests.support.kv_transfer import PRICES, SlowTransport, tiny_engine, tiny_request, whole_answer
from tests.support.kv_transfer_scene import run_scenario
from tests.support.scenes import scenes

TOKENS, CACHED = 50, 48
LONGER = 250
"""Such a prompt begins with the other one."""
STREAMS = 12


def moved(scene, *, streams, peers=True):
    """Have one prefill and one decode worker compute a prompt, and run a scene while they drain and two others get requests.

    Args:
        scene: called with the cluster and the dispatcher.
        streams: that the new decode worker answers meanwhile.
        peers: whether workers load what others have cached.
    """
    config = WorkerConfig(kv_transfer=KvTransferConfig(peers=peers))

    async def drained(cluster, dispatcher):
        async with AsyncExitStack() as stack:
            opened = dispatcher.open(tiny_request("stays", 12, 380, seed=9))
            await anext(await stack.enter_async_context(opened))
            await whole_answer(dispatcher, tiny_request("first", TOKENS))
            for name, role in (("p1", Role.PREFILL), ("d1", Role.DECODE)):
                worker = {"role": role, "prices": PRICES, "config": config}
                await cluster.start(
                    name, tiny_engine(), transport=SlowTransport(lambda _bytes: 1e-4), **worker
                )
                cluster.engine(name)._prefix_loads._compute_s = lambda new, _cached: (
                    new * PRICES.prefill_token_s
                )
            cluster.worker("p0").stop()
            cluster.worker("d0").stop()
            await asyncio.sleep(0.5)
            for number in range(streams):
                opened = dispatcher.open(tiny_request(f"stream{number}", 12, 380, seed=20 + number))
                await anext(await stack.enter_async_context(opened))
            await asyncio.sleep(0.2)
            await scene(cluster, dispatcher)

    run_scenario(
        drained,
        router=RouterConfig(policy="kv", disagg=DisaggConfig(remote_tokens_min=16, link_bytes_per_s=1e9)),
        transport=lambda: SlowTransport(lambda _bytes: 1e-4),
        config=config,
    )


moved_scene = scenes(moved, 2)


def loaded(cluster, name):
    return cluster.worker(name).kv_transfer.peer_loads.loaded_tokens


@moved_scene(streams=STREAMS)
async def test_a_prompt_that_another_decode_worker_has_is_not_computed_by_a_prefill_worker(
    cluster, dispatcher, decision_lines
):
    """Beside streams, all of it would be."""

    answer = await whole_answer(dispatcher, tiny_request("again", TOKENS))
    assert answer[2] == CACHED
    assert (loaded(cluster, "d1"), loaded(cluster, "p1")) == (CACHED, 0)
    assert not dispatcher.explain("again")[0].prefill.remote
    replayed = [one for one in Replay().run(decision_lines()) if one.request_id == "again"]
    assert [(one.worker, one.differs) for one in replayed] == [("d1", False)]


@moved_scene(streams=STREAMS)
async def test_a_prefill_worker_loads_what_a_decode_worker_has_and_hands_all_of_it_over(
    cluster, dispatcher, decision_lines
):
    """The prefill worker has nothing of the prompt's beginning either."""

    answer = await whole_answer(dispatcher, tiny_request("longer", LONGER))
    explained = dispatcher.explain("longer")[0]
    assert explained.prefill.remote
    assert (loaded(cluster, "p1"), loaded(cluster, "d1")) == (CACHED, 0)
    assert answer[2] == CACHED
    priced = explained.prefill.candidates[0].terms["prefill"]
    assert priced == pytest.approx(
        1e3 * (PRICES.prefill_step_s + (LONGER - CACHED) * PRICES.prefill_token_s), rel=0.2
    )
    replayed = [one for one in Replay().run(decision_lines()) if one.request_id == "longer"]
    assert [(one.worker, one.differs) for one in replayed] == [("p1/d1", False)]
