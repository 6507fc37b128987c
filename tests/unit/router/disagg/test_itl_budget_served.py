"""Prompts that would wait long for their prefill worker, beside streams of which few tokens may be late, in whole deployments on virtual time."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from penstock.core.types.instances import Role
from penstock.router.config import DisaggConfig, RouterConfig
from penstock.router.disagg.itl_budget import WINDOW_S
from penstock.router.dispatch.progress import Progress
from penstock.router.policy.policies import make_policy
from penstock.router.policy.selector import WorkerSelector
from penstock.sim.loop.loop import run_virtual
from tests.support.cluster import MemoryCluster
from tests.support.kv_transfer import PRICES, tiny_engine, tiny_request, whole_answer
from tests.support.kv_transfer_scene import beside_streams
from tests.support.kv_transfer_scene import run_scenario as run_in_scene

PROMPTS, PROMPT_TOKENS = 16, 60  # one chunk, and so one step
STREAMS = {"streams": 5, "prompt_tokens": 3}
STEP_S = PRICES.decode_step_s + 5 * PRICES.decode_sequence_s
PROMPT_S = PRICES.prefill_step_s + PROMPT_TOKENS * (PRICES.prefill_token_s + STEP_S / 64)


def engine(_name=""):
    return tiny_engine(kv_blocks=4000)


def run_scenario(scene, names=("p0", "d0"), **options):
    run_in_scene(scene, names, engine=engine, **options)


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


@pytest.mark.parametrize(("steps", "local"), [(0, 0), (1.5, 1), (3.5, 3)])
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


@pytest.mark.parametrize(("pause_s", "again"), [(0.0, 0), (WINDOW_S / 2, 1), (2 * WINDOW_S, 2)])
def test_what_was_made_late_is_made_up_for(pause_s, again):
    async def scene(_cluster, dispatcher):
        first, _ = await beside_streams(dispatcher, lambda: burst(dispatcher), **STREAMS)
        await asyncio.sleep(pause_s)
        later, _ = await beside_streams(dispatcher, lambda: burst(dispatcher, 50), **STREAMS)
        assert (first.count("d0"), later.count("d0")) == (2, again)

    run_scenario(scene, router=router(2.3))


def test_where_nobody_streams_nobody_is_made_late():
    registry = CollectorRegistry()

    async def scene(_cluster, dispatcher):
        workers, _ = await burst(dispatcher)
        assert workers.count("d0") == 2
        late_steps = registry.get_sample_value("penstock_router_late_steps_total")
        assert late_steps == 1, "the second has the first beside it, and a full account is enough for that"

    run_scenario(scene, router=router(1e-6), registry=registry)


def test_a_prompt_that_is_sent_again_elsewhere_costs_both_workers():
    async def scene(_cluster, dispatcher):
        async def run():
            shared = dispatcher._shared
            tokens = shared.router.disagg.itl_budget
            asking = [asyncio.ensure_future(whole_answer(dispatcher, asked(n))) for n in range(8)]
            await asyncio.sleep(0.01)
            progress = Progress(asked(99), shared.fleet.pools["tiny"].card, shared.hash_key)
            candidates = shared.router.score(progress.request())
            assert candidates.decision.comparison.setting == "late_token_share"
            slot, lost_s, decision = candidates.choice.slot, [], candidates.decision
            _, cost_s = decision.inputs.override.late(
                decision.whole_context, decision.whole, WorkerSelector(make_policy("kv"))
            )
            for again in (False, True):
                before_s = tokens._empty_s[slot]
                shared.router.take(candidates, again=again)
                lost_s.append(tokens._empty_s[slot] - before_s)
            assert lost_s == pytest.approx([cost_s[slot]] * 2)
            await asyncio.gather(*asking)

        await beside_streams(dispatcher, run, **STREAMS)

    def asked(number):
        return tiny_request(f"asked{number}", PROMPT_TOKENS, 3, seed=number)

    run_scenario(scene, router=router(9))


def test_frontends_share_what_may_be_late():
    async def main():
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

    run_virtual(main())


@pytest.mark.parametrize(
    ("policy", "steps", "warns"), [("least-loaded", 1, True), ("kv", 1, False), ("least-loaded", 0, False)]
)
def test_what_is_set_and_has_no_effect_is_told_at_the_start(policy, steps, warns):
    async def main():
        async with MemoryCluster() as cluster:
            with capture_logs() as logs:
                async with cluster.dispatcher(router(steps).model_copy(update={"policy": policy})):
                    pass
        told = [line for line in logs if line["event"] == "late_token_share_without_effect"]
        assert [(line["log_level"], line["policy"]) for line in told] == [("warning", policy)] * warns

    run_virtual(main())
