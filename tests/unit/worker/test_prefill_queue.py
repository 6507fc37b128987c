"""Prompts that wait: at a prefill worker, or at the router for one; seen, in turn, and gone when their clients are."""

import asyncio

import msgspec
import pytest

from penstock.core.errors import Overloaded
from penstock.core.types.instances import Role
from penstock.router.config import DisaggConfig, QueueConfig, RouterConfig
from tests.support import kv_transfer_scene
from tests.support.kv_transfer import (
    PRICES,
    tiny_engine,
    tiny_request,
    whole_answer,
)
from tests.support.scenes import run_by

WEAK = msgspec.structs.replace(PRICES, prefill_token_s=0.1)
"""What decode workers say whose prompts had better be computed elsewhere."""


def run_scenario(scene, names=("p0", "d0"), *, queue=None, policy="kv", decode=PRICES, **options):
    """Run a scene with `kv`, which sends prompts to prefill workers while that costs less, or as told."""
    router = RouterConfig(
        policy=policy,
        disagg=DisaggConfig(remote_tokens_min=1, kv_transfer_s=0.0),
        queue=queue or QueueConfig(threshold_s=None),
    )

    kv_transfer_scene.run_scenario(scene, names, router=router, prices={Role.DECODE: decode}, **options)


def ask(dispatcher, name, length, **options):
    return asyncio.ensure_future(whole_answer(dispatcher, tiny_request(name, length, **options)))


def num_queued(cluster):
    return cluster.registry.get_sample_value("penstock_router_queued_requests")


async def ask_beyond_the_threshold(cluster, dispatcher, number=9, length=300, **options):
    """Ask more at once than is sent to prefill workers; give the answers to come, some of them to requests held."""
    answers = [ask(dispatcher, f"r{n}", length, seed=n, **options) for n in range(number)]
    await asyncio.sleep(0.2)
    assert num_queued(cluster) >= 2
    return answers


async def first_token_s(dispatcher, name, length, seed):
    loop = asyncio.get_running_loop()
    asked_s = loop.time()
    async with dispatcher.open(tiny_request(name, length, seed=seed, max_tokens=2)) as stream:
        await anext(stream)
        return loop.time() - asked_s


@run_by(run_scenario, policy="least-loaded")
async def test_what_waits_is_shown_by_worker(cluster, dispatcher):
    answers = [ask(dispatcher, f"r{n}", 300, seed=n) for n in range(5)]
    await asyncio.sleep(0.8)
    views = {view.name: view for view in dispatcher.workers()}
    load = views["p0"].load
    assert load["running_requests"] + load["waiting_requests"] >= 3
    assert 0.4 <= load["oldest_wait_s"] <= 0.8
    value = cluster.registry.get_sample_value
    labels = {"worker": "p0"}
    assert value("penstock_router_prefill_waiting_requests", labels) == load["waiting_requests"]
    assert value("penstock_router_prefill_oldest_wait_seconds", labels) == load["oldest_wait_s"]
    await asyncio.gather(*answers)
    await asyncio.sleep(2)
    load = next(view.load for view in dispatcher.workers() if view.name == "p0")
    assert (load["waiting_requests"], load["oldest_wait_s"]) == (0, 0)
    cluster.kill("p0")
    await asyncio.sleep(0.1)
    assert value("penstock_router_prefill_waiting_requests", labels) is None


@pytest.mark.parametrize(("policy", "is_counted"), [("kv", True), ("least-loaded", False)])
def test_the_seconds_that_were_compared_are_counted(policy, is_counted):
    async def scene(cluster, dispatcher):
        compared = []
        for number, length in enumerate((300, 40, 120)):
            await whole_answer(dispatcher, tiny_request(f"r{number}", length, seed=number))
            compared.append(dispatcher.explain(f"r{number}")[0].prefill)
        assert (compared[0].local is not None) is is_counted
        for part in ("local", "prefill", "decode"):
            counted = cluster.registry.get_sample_value(
                "penstock_router_prefill_predicted_seconds_total", {"part": part}
            )
            if is_counted:
                assert counted == pytest.approx(sum(getattr(one, part) for one in compared) / 1e3)
            else:
                assert counted is None, "numbers of a policy without times"

    run_scenario(scene, policy=policy)


@run_by(run_scenario, queue=QueueConfig(threshold_s=0.3, work_weight=0), decode=WEAK)
async def test_who_needs_no_prefill_worker_does_not_wait_behind_those_who_do(cluster, dispatcher):
    await whole_answer(dispatcher, tiny_request("known", 300, seed=99))
    answers = await ask_beyond_the_threshold(cluster, dispatcher, 10, 390, max_tokens=3)
    held = num_queued(cluster)
    before = cluster.engine("d0").load().generated_tokens
    took_s = await first_token_s(dispatcher, "again", 300, 99)
    assert cluster.engine("d0").load().generated_tokens > before
    assert took_s < 0.2, "what is left of it is computed where it is cached"
    assert num_queued(cluster) >= held - 2
    await asyncio.gather(*answers)


@run_by(run_scenario, ("p0", "p1", "d0"), queue=QueueConfig(threshold_s=0.3))
async def test_who_is_held_for_a_prefill_worker_and_leaves_leaves_nothing(cluster, dispatcher):
    answers = await ask_beyond_the_threshold(cluster, dispatcher)
    for answer in answers:
        answer.cancel()
    await asyncio.sleep(0.2)
    assert num_queued(cluster) == 0
    assert sum(cluster.engine(name).load().prefilled_tokens for name in cluster.names) < 1000


@run_by(run_scenario, ("p0", "p1", "d0"), queue=QueueConfig(threshold_s=0.3, requests_max=8))
async def test_past_the_bound_prompts_for_prefill_workers_are_refused(cluster, dispatcher):
    answers = [ask(dispatcher, f"r{n}", 300, seed=n, max_tokens=3) for n in range(20)]
    results = await asyncio.gather(*answers, return_exceptions=True)
    refused = [result for result in results if isinstance(result, Overloaded)]
    assert refused
    assert all(error.retry_after_s >= 1 for error in refused)
    assert len(refused) < 16


@pytest.mark.slow
def test_prompts_are_not_computed_ahead_of_workers_whose_places_are_all_taken():
    """Four places for answers of 2 s each, and a prefill worker that would be through with all prompts at once."""

    async def scene(cluster, dispatcher):
        asked = [tiny_request(f"r{n}", 40, max_tokens=200, seed=n) for n in range(60)]
        answers = [asyncio.ensure_future(whole_answer(dispatcher, request)) for request in asked]
        await asyncio.sleep(1.5)
        assert num_queued(cluster) > 30
        decode = kv_transfer_scene.load_of(dispatcher, "d0")
        assert decode["running_requests"] == 4
        assert decode["waiting_requests"] <= 4
        for answer in answers:
            await answer

    def engine(name):
        return tiny_engine(kv_blocks=4000, places=4 if name == "d0" else 64)

    run_scenario(scene, queue=QueueConfig(), decode=WEAK, engine=engine)
