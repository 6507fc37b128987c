"""Workers that cannot transfer KV to each other: not used for that, and `workers()` says why."""

import asyncio

import msgspec
import pytest

from penstock.core.errors import ConfigError
from penstock.core.types.instances import CardFile, Role
from penstock.core.types.kv import KvLayout
from penstock.core.types.requests import FinishReason
from penstock.router.config import DisaggConfig, RouterConfig
from penstock.sim.loop import run_virtual
from penstock.transfer import TransferAgent, TransferConfig
from tests.support.cluster import MemoryCluster, small_card
from tests.support.kv_transfer import (
    BLOCK_SIZE,
    PRICES,
    tiny_engine,
    tiny_laid_out_engine,
    tiny_request,
    whole_answer,
)
from tests.support.manual_engine import ManualEngine
from tests.support.scenes import run_by

ALWAYS = RouterConfig(policy="least-loaded", disagg=DisaggConfig(remote_tokens_min=1))
MODEL = KvLayout(
    num_layers=3, num_kv_heads=4, head_dim=4, dtype="float16", element_bytes=2, block_size=BLOCK_SIZE
).split(num_blocks=1, tp=2)


def other(**fields):
    return msgspec.structs.replace(MODEL, **fields)


def run_scenario(scene, router=ALWAYS):
    async def main():
        async with MemoryCluster() as cluster, cluster.dispatcher(router) as dispatcher:
            await scene(cluster, dispatcher)
            dispatcher.check()

    run_virtual(main())


def problems(dispatcher):
    return {view.name: view.kv_transfer_problem for view in dispatcher.workers()}


@pytest.mark.parametrize(
    ("engine", "text"),
    [
        (lambda: tiny_laid_out_engine(other(dtype="bfloat16")), "dtype is 'bfloat16' at the source"),
        (lambda: tiny_laid_out_engine(other(head_dim=8)), "head_dim is 8 at the source"),
        (lambda: tiny_laid_out_engine(other(ranks=MODEL.ranks[:1])), "which no rank of the source has"),
        (lambda: tiny_engine(kv_bytes=0), "keeps no memory for KV"),
        (tiny_engine, "num_layers is 1 at the source"),
    ],
)
@run_by(run_scenario)
async def test_a_prefill_worker_that_fits_nobody_gets_nothing_until_somebody_fits_it(
    cluster, dispatcher, *, engine, text
):
    await cluster.start("p", engine(), role=Role.PREFILL)
    await cluster.start("d", tiny_laid_out_engine(MODEL), role=Role.DECODE)
    await dispatcher.looked()
    tokens, *_ = await whole_answer(dispatcher, tiny_request("a"))
    assert len(tokens) == 20
    assert cluster.engine("p").load().steps == 0
    assert problems(dispatcher)["p"].startswith("none of 1 workers can go on with its prompts; d: ")
    assert text in problems(dispatcher)["p"]
    assert problems(dispatcher)["d"].startswith("none of 1 workers can hand it prompts; p: ")
    await cluster.start("d1", engine(), role=Role.DECODE)
    await asyncio.sleep(1)
    assert problems(dispatcher)["p"] is None
    await whole_answer(dispatcher, tiny_request("b", seed=3))
    assert cluster.engine("p").load().prefilled_tokens == 50
    assert cluster.engine("d1").load().prefilled_tokens == 1, "who fits goes on"


@pytest.mark.parametrize("policy", ["least-loaded", "round-robin", "random", "session", "kv"])
def test_of_several_that_answer_only_those_that_fit_are_handed_prompts(policy):
    disagg = DisaggConfig(remote_tokens_min=1, local_tokens_max=1)

    async def scene(cluster, dispatcher):
        await cluster.start("p", tiny_laid_out_engine(MODEL), role=Role.PREFILL, prices=PRICES)
        for name, layout in (("d", MODEL), ("other", other(head_dim=8))):
            await cluster.start(name, tiny_laid_out_engine(layout), role=Role.DECODE, prices=PRICES)
        await dispatcher.looked()
        for number in range(6):
            await whole_answer(dispatcher, tiny_request(f"r{number}", seed=number))
            (decision,) = dispatcher.explain(f"r{number}")
            assert (decision.prefill.worker, decision.worker) == ("p", "d")
            assert [(left.worker, left.why) for left in decision.left_out] == [("other", "unfit")]
        assert cluster.engine("p").load().prefilled_tokens == 6 * 50
        assert cluster.engine("other").load().steps == 0
        cluster.kill("d")
        await asyncio.sleep(2)
        _, reason, *_ = await whole_answer(dispatcher, tiny_request("alone", seed=9))
        assert reason is FinishReason.LENGTH, "it answers all the same"
        assert cluster.engine("other").load().prefilled_tokens == 50

    run_scenario(scene, RouterConfig(policy=policy, disagg=disagg))


@run_by(run_scenario)
async def test_without_a_transport_in_common_nothing_is_transferred(cluster, dispatcher):
    for name, role, transport in (("p", Role.PREFILL, "shm"), ("d", Role.DECODE, "tcp")):
        config = TransferConfig(listen=("memory",), transports=(transport,))
        await cluster.start(name, tiny_engine(), role=role, agent=TransferAgent(name, config))
    await dispatcher.looked()
    await whole_answer(dispatcher, tiny_request("a"))
    assert cluster.engine("p").load().steps == 0
    assert problems(dispatcher) == {
        "p": "none of 1 workers can go on with its prompts; d: no transport in common: shm there, tcp here",
        "d": "none of 1 workers can hand it prompts; p: no transport in common: shm there, tcp here",
    }


@run_by(run_scenario)
async def test_a_role_without_a_partner_says_so(cluster, dispatcher):
    await cluster.start("p", tiny_engine(), role=Role.PREFILL)
    await dispatcher.looked()
    assert problems(dispatcher) == {
        "p": "no decode or aggregated worker of its model is there to go on with its prompts"
    }
    await cluster.start("other", tiny_engine(), role=Role.DECODE, card=small_card("another"))
    await asyncio.sleep(1)
    assert problems(dispatcher)["p"] is not None, "that one serves another model"
    assert problems(dispatcher)["other"] is None, "it serves alone"
    await cluster.start("d", tiny_engine(), role=Role.DECODE)
    await asyncio.sleep(1)
    assert problems(dispatcher)["p"] is None


@pytest.mark.parametrize(
    ("card", "text"),
    [
        (
            msgspec.structs.replace(small_card(), salt=b"tiny-2"),
            "salt 74696e792d32, the model's other workers have salt 74696e792d31: other weights, number formats or engine",
        ),
        (
            msgspec.structs.replace(
                small_card(), salt=b"2", files=(CardFile(name="config.json", sha256="0", size_bytes=1),)
            ),
            "salt 32, the model's other workers have salt 74696e792d31: other config.json",
        ),
        (small_card(block_size=8), "blocks of 8 tokens, the model's other workers have 4"),
    ],
)
@run_by(run_scenario)
async def test_workers_of_another_revision_or_block_size_are_not_used_and_say_why(
    cluster, dispatcher, *, card, text
):
    await cluster.start("d", tiny_engine(), role=Role.DECODE)
    await dispatcher.looked()
    engine = tiny_engine() if card.block_size == 4 else tiny_engine(block_size=8)
    await cluster.start("p", engine, role=Role.PREFILL, card=card)
    await asyncio.sleep(1)
    await whole_answer(dispatcher, tiny_request("a"))
    assert engine.load().steps == 0
    views = {view.name: view for view in dispatcher.workers()}
    assert (views["p"].condition, views["d"].condition) == ("mismatched", "ready")
    assert views["p"].problem == f"{text}; it is used once these are gone"
    assert views["d"].problem is None


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
@pytest.mark.virtual
async def test_an_engine_that_gives_no_kv_is_refused_in_a_role_that_moves_it(role):
    async with MemoryCluster() as cluster:
        with pytest.raises(ConfigError, match=f"role {role}: the engine of w transfers no KV"):
            await cluster.start("w", ManualEngine(), role=role)
