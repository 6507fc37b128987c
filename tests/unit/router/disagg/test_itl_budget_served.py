"""Prompts that would wait long for their prefill worker, beside streams of which few tokens may be late, in whole deployments on virtual time."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from penstock.core.types.instances import Role
from penstock.router.config import DisaggConfig, RouterConfig
from penstock.router.disagg.itl_budget import WINDOW_S
from tests.support.cluster import MemoryCluster
from tests.support.kv_transfer import PRICES, tiny_engine, tiny_request, whole_answer
from tests.support.kv_transfer_scene import beside_streams
from tests.support.kv_transfer_scene import run_scenario as run_in_scene
from tests.support.scenes import scenes

PROMPTS, PROMPT_TOKENS = 16, 60  # one chunk, and so one step
STREAMS = {"streams": 5, "prompt_tokens": 3}
STEP_S = PRICES.decode_step_s + 5 * PRICES.decode_sequence_s
PROMPT_S = PRICES.prefill_step_s + PROMPT_TOKENS * (PRICES.prefill_token_s + STEP_S / 64)


def engine(_name=""):
    return tiny_engine(kv_blocks=4000)


def run_scenario(scene, names=("p0", "d0"), **options):
    run_in_scene(scene, names, engine=engine, **options)


scenario = scenes(run_scenario, 2)


def router(steps, **config):
    """Every prompt is disaggregated but for so many that may make streams late in a window."""
    share = steps * STEP_S / (WINDOW_S - steps * PROMPT_S)
    disagg = DisaggConfig(remote_tokens_min=4, local_tokens_max=1, late_token_share=share, kv_transfer_s=0.0)
    return RouterConfig(policy="kv", disagg=disagg, **config)


async def burst(dispatcher, first=0):
    """Send sixteen prompts at once; give the workers that computed them, and the answers' tokens."""
    asked = [tiny_request(f"r{first + n}", PROMPT_TOKENS, 3, seed=first + n) for n in range(PROMPTS)]
    answers = await asyncio.gather(*(whole_answer(dispatcher, request) for request in asked))
    decisions = [dispatcher.explain(request.request_id)[0] for request in asked]
    workers = [(one.prefill and one.prefill.worker) or one.worker for one in decisions]
    return workers, [answer[0] for answer in answers]


@pytest.mark.parametrize(("steps", "local"), [(0, 0), (3.5, 3)])
def test_as_many_prompts_are_computed_beside_streams_as_may_make_them_late(steps, local):
    registry = CollectorRegistry()
    expected = []

    async def whole(_cluster, dispatcher):
        expected.extend((await burst(dispatcher))[1])

    async def scene(_cluster, dispatcher):
        workers, answers = await beside_streams(dispatcher, lambda: burst(dispatcher), **STREAMS)
        assert workers.count("d0") == local
        assert answers == expected
        assert registry.get_sample_value("penstock_router_late_steps_total") == local
        assert workers[0] == "p0", "the first one need not wait"

    run_scenario(whole, ("a0",), router=RouterConfig(policy="kv"))
    run_scenario(scene, router=router(steps), registry=registry)


@pytest.mark.parametrize(("pause_s", "again"), [(0.0, 0), (WINDOW_S / 2, 1)])
@scenario(router=router(2.3))
async def test_what_was_made_late_is_made_up_for(cluster, dispatcher, pause_s, again):
    first, _ = await beside_streams(dispatcher, lambda: burst(dispatcher), **STREAMS)
    await asyncio.sleep(pause_s)
    later, _ = await beside_streams(dispatcher, lambda: burst(dispatcher, 50), **STREAMS)
    assert (first.count("d0"), later.count("d0")) == (2, again)


@pytest.mark.virtual
async def test_frontends_share_what_may_be_late():
    async with MemoryCluster() as cluster:
        for name in ("p0", "d0"):
            role = Role.PREFILL if name == "p0" else Role.DECODE
            await cluster.start(name, engine(), role=role, prices=PRICES)
        async with (
            cluster.dispatcher(router(4.5)) as one,
            cluster.dispatcher(router(4.5)) as other,
        ):
            await one.looked()
            await other.looked()

            async def run():
                return [(await burst(each, 50 * n))[0].count("d0") for n, each in enumerate((one, other))]

            assert await beside_streams(one, run, **STREAMS) == [2, 2]


@pytest.mark.parametrize(
    ("policy", "steps", "warns"), [("least-loaded", 1, True), ("kv", 1, False), ("least-loaded", 0, False)]
)
@pytest.mark.virtual
async def test_what_is_set_and_has_no_effect_is_told_at_the_start(policy, steps, warns):
    async with MemoryCluster() as cluster:
        with capture_logs() as logs:
            async with cluster.dispatcher(router(steps).model_copy(update={"policy": policy})):
                pass
    told = [line for line in logs if line["event"] == "late_token_share_without_effect"]
    assert [(line["log_level"], line["policy"]) for line in told] == [("warning", policy)] * warns
