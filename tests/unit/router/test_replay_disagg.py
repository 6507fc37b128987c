"""Disaggregation decisions, made again from their log lines: where, by whom, and who goes on."""

import asyncio
import json
from contextlib import AsyncExitStack

import msgspec
import pytest

from penstock.core.errors import ConfigError
from penstock.core.types.instances import Role
from penstock.router.config import DisaggConfig, RouterConfig
from penstock.router.replay import RoutingReplay
from penstock.sim.loop import run_virtual
from tests.support.cluster import MemoryCluster
from tests.support.kv_transfer import PRICES, tiny_engine, tiny_request, whole_answer

POLICIES = [
    "kv",
    "least-loaded",
    "power-of-two",
    "round-robin",
    "random",
    "session",
    "benchmarks.baselines.product:Product",
]


async def traffic(dispatcher):
    """Long prompts and short ones, of three sessions, beside streams that a long prompt would hold up."""
    async with AsyncExitStack() as stack:
        for number in range(8):
            stream = dispatcher.open(tiny_request(f"stream{number}", 12, 300, seed=number))
            await anext(await stack.enter_async_context(stream))
        await asyncio.sleep(0.2)  # until their workers have told of them
        for number, length in enumerate((300, 5, 200, 40, 300, 3)):
            asked = tiny_request(f"r{number}", length, 4)
            await whole_answer(dispatcher, msgspec.structs.replace(asked, session=f"s{number % 3}"))
        at_once = [tiny_request(f"burst{number}", 300, 4, seed=50 + number) for number in range(10)]
        await asyncio.gather(*(whole_answer(dispatcher, asked) for asked in at_once))


@pytest.fixture
def lines(decision_lines):
    """Serve traffic by a policy on two prefill and two decode workers; give what is logged of its decisions."""

    def serve(policy):
        async def main():
            async with MemoryCluster() as cluster:
                for name, role in (
                    ("p0", Role.PREFILL),
                    ("d0", Role.DECODE),
                    ("p1", Role.PREFILL),
                    ("d1", Role.DECODE),
                ):
                    await cluster.start(name, tiny_engine(), role=role, prices=PRICES)
                disagg = DisaggConfig(remote_tokens_min=4)
                config = RouterConfig(policy=policy, disagg=disagg)
                async with cluster.dispatcher(config) as dispatcher:
                    await dispatcher.looked()
                    await traffic(dispatcher)

        run_virtual(main())
        return decision_lines()

    return serve


@pytest.mark.parametrize(
    "policy", [POLICIES[0], *(pytest.param(policy, marks=pytest.mark.nightly) for policy in POLICIES[1:])]
)
def test_both_workers_of_a_request_are_chosen_again(policy, lines):
    replayed = list(RoutingReplay().run(lines(policy)))
    assert [(one.request_id, one.worker, one.again) for one in replayed if one.differs] == []
    waited = [one.worker[0] for one in replayed if one.request_id.startswith("burst")]
    assert policy != "kv" or waited.count("d") > waited.count("p"), "some never went elsewhere"
    kinds = {name[0] for name in (one.worker for one in replayed)}
    assert kinds == {"p", "d"}
    (pair,) = [one.worker for one in replayed if one.request_id == "r0"]
    assert [name[0] for name in pair.split("/")] == ["p", "d"], "a long prompt is disaggregated"
    assert [one.worker[0] for one in replayed if one.request_id == "r5"] == ["d"], "three tokens are not"


def test_whether_a_prompt_goes_elsewhere_is_weighed_anew(lines):
    """With a link too slow to move anything, `kv` would have computed all of them where the answers are."""
    changed = []
    for line in lines("kv"):
        data = json.loads(line)
        if data["inputs"] is not None:
            data["inputs"]["block_s"] = ["float64", data["inputs"]["block_s"][1], 60.0]
            changed.append(json.dumps(data))
    replayed = list(RoutingReplay().run(changed))
    away = [one for one in replayed if one.worker.startswith("p")]
    assert away
    assert all(one.again.startswith("d") and one.costs_more > 10.0 for one in away), "ms: a step takes ten"
    assert not any(one.differs for one in replayed if one not in away)


def test_what_was_weighed_and_cannot_be_read_is_named(lines):
    (line, *_) = (line for line in lines("kv") if json.loads(line)["inputs"] is not None)
    for name, value in (
        ("config", {"link_bytes_per_s": "x"}),
        ("config", None),
        ("blocks_", 1),
        ("prefill_mask", ["?"]),
    ):
        data = json.loads(line)
        data["inputs"][name] = value
        with pytest.raises(ConfigError, match="line 1: a decision that cannot be read"):
            list(RoutingReplay().run([json.dumps(data)]))
