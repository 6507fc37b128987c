"""Links that take seconds to be set up, in whole deployments on virtual time: when they are first used, and by whom."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from penstock.router.config import DisaggConfig, RouterConfig
from penstock.transfer.transports.memory import MemoryTransport
from tests.support.kv_transfer import PRICES, tiny_engine, tiny_request, whole_answer
from tests.support.kv_transfer_scene import beside_streams, run_scenario
from tests.support.scenes import scenes

SETUP_S = 2.0
PREDICTED = RouterConfig(policy="kv", disagg=DisaggConfig(remote_tokens_min=4))
FORCED = RouterConfig(policy="kv", disagg=DisaggConfig(remote_tokens_min=4, local_tokens_max=1))
"""Every prompt is disaggregated."""
PROMPT_TOKENS = 60  # one chunk
PREFILL_S = PRICES.prefill_step_s + PROMPT_TOKENS * (PRICES.prefill_token_s + PRICES.decode_step_s / 64)
"""What such a prompt takes to compute: its link is set up meanwhile."""


class DistantTransport(MemoryTransport):
    """Takes its time to reach a peer, and says so."""

    setup_s = SETUP_S

    def __init__(self):
        super().__init__(threads=1, inline_bytes_max=1 << 20)

    async def connect(self, link, contact, regions):
        if link is not None:
            await asyncio.sleep(self.setup_s)
        return await super().connect(link, contact, regions)


def run_distant(scene, names=("p0", "d0"), *, router=PREDICTED, registry=None):
    run_scenario(
        scene,
        names,
        router=router,
        registry=registry,
        engine=lambda _name: tiny_engine(kv_blocks=4000),
        transport=DistantTransport,
    )


distant = scenes(run_distant, 2)


async def ask(dispatcher, number, length=PROMPT_TOKENS):
    """Give the explanations of a request, and how long it took."""
    began_s = asyncio.get_running_loop().time()
    await whole_answer(dispatcher, tiny_request(f"r{number}", length, 3, seed=number))
    return dispatcher.explain(f"r{number}"), asyncio.get_running_loop().time() - began_s


async def ask_until_remote(dispatcher, most):
    """Give what was decided of requests until the first one that is disaggregated, and how long that took."""
    decided = []
    for number in range(most):
        explained, took_s = await ask(dispatcher, number)
        decided.append(explained)
        if explained[0].prefill.remote:
            return decided, took_s
    return decided, None


def charged_s(registry):
    """What the metric has added up."""
    name = "penstock_router_prefill_predicted_seconds_total"
    return registry.get_sample_value(name, {"part": "link_setup"})


def credit_s(explained):
    prefill = explained[0].prefill
    return max(prefill.local - prefill.prefill - prefill.decode, 0.0) / 1e3


def test_a_link_is_used_once_as_much_was_credited_as_it_costs_and_stays_open():
    registry = CollectorRegistry()

    async def asks(dispatcher):
        streams_s = charged_s(registry)
        decided, took_s = await ask_until_remote(dispatcher, 40)
        *local, last = decided
        assert len(local) > 5, "each alone is worth less than a set-up"
        assert local[0][0].prefill.link_setup == pytest.approx(1e3 * (SETUP_S - PREFILL_S))
        charged = [explained[0].prefill.link_setup / 1e3 for explained in decided]
        for before, after, explained in zip(charged, charged[1:], local, strict=False):
            assert before - after == pytest.approx(credit_s(explained))
        total_s = sum(credit_s(explained) for explained in local)
        assert 0.5 * SETUP_S < total_s < SETUP_S, "nobody waits for more than one set-up's sake"
        assert last[0].prefill.remote
        assert last[0].chosen.terms["network"] >= 0.9 * last[0].prefill.link_setup
        told = last[0].prefill
        assert (told.prefill_worker, told.decode_worker) == (told.worker, last[0].worker)
        parts = told.decode + told.link_setup - told.kv_transfer
        assert parts == pytest.approx(last[0].chosen.cost), "the decode worker's part is its row's cost"
        assert took_s > SETUP_S, "it sets the link up"
        assert charged_s(registry) - streams_s == pytest.approx(sum(charged))
        for number in range(100, 103):
            explained, took_s = await ask(dispatcher, number)
            assert explained[0].prefill.remote
            assert explained[0].prefill.link_setup == 0.0
            assert took_s < 0.5

    async def scene(_cluster, dispatcher):
        await beside_streams(dispatcher, lambda: asks(dispatcher), streams=8)

    run_distant(scene, registry=registry)


async def charge_ms(dispatcher, number):
    explained, _ = await ask(dispatcher, number)
    return explained[0].prefill.link_setup


@distant(router=FORCED)
async def test_another_frontend_hears_that_a_link_is_there(cluster, dispatcher):
    assert await charge_ms(dispatcher, 0) == pytest.approx(1e3 * (SETUP_S - PREFILL_S))
    async with cluster.dispatcher(FORCED) as other:
        await other.looked()
        await asyncio.sleep(1)  # until the decode worker has told of its load
        assert await charge_ms(other, 1) == 0.0
