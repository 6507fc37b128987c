"""Policies from elsewhere: by module and class, by entry point, and what is said where there is none."""

import asyncio
import sys
from pathlib import Path

import numpy as np
import pytest

from penstock.core.errors import ConfigError, PenstockError
from penstock.router.config import RouterConfig
from penstock.router.policies import choose, make_policy
from penstock.testing.routing_policy import RoutingPolicySuite, some_contexts
from tests.support.scene import make_request, run_scenario, scenario

EXAMPLES = Path(__file__).parents[3] / "examples"
EXAMPLE = "routing_policy:QuietestHolder"


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield
    sys.modules.pop("routing_policy", None)


class TestTheExample(RoutingPolicySuite):
    def make(self):
        return make_policy(EXAMPLE)


def test_the_example_does_what_it_says():
    policy = make_policy(EXAMPLE)
    context = next(c for c in some_contexts() if len(c.eligible) == 3)
    context.eligible[:], context.request_tokens, context.waiting_requests[:] = True, 160, 0
    context.overlap_blocks[:], context.running_requests[:] = [0, 5, 9], [0, 7, 8]
    assert policy.costs(context).tolist() == [9, 7, 8]
    assert choose(policy.costs(context), context.eligible, 1) == 1  # 80 of 160 tokens are half
    context.overlap_blocks[:] = [0, 4, 4]
    assert choose(policy.costs(context), context.eligible, 1) == 0  # nobody holds half of it


def test_a_policy_is_found_by_its_entry_point(tmp_path, monkeypatch):
    info = tmp_path / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[penstock.policies]\nquietest-holder = {EXAMPLE}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert make_policy("quietest-holder").name == "quietest-holder"
    assert RouterConfig(policy="quietest-holder").policy == "quietest-holder"
    with pytest.raises(ConfigError, match="did you mean 'quietest-holder'"):
        make_policy("quietest-holders")


@pytest.mark.parametrize(
    ("name", "message", "at_start"),
    [
        ("roundrobin", "'roundrobin' is unknown; did you mean 'round-robin'", False),
        ("nowhere.at_all:Policy", "there is no module 'nowhere'", False),
        ("routing_policy:", "expected `package.module:Class`", False),
        ("routing_policy.at_all:Policy", "'routing_policy.at_all' cannot be imported: No module named", True),
        ("routing_policy:QuietestHoldr", "has no 'QuietestHoldr'; did you mean 'QuietestHolder'", True),
        ("routing_policy:RoutingContext", "it could not be made without arguments", True),
        ("pathlib:Path", "has no name and no costs|has no costs", True),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts_or_when_a_router_does(name, message, at_start):
    if at_start:
        config = RouterConfig.parse({"policy": name}, source="graph.yaml")
    with pytest.raises(ConfigError, match=message):
        config.new_policy() if at_start else RouterConfig.parse({"policy": name}, source="graph.yaml")


def test_checking_a_configuration_runs_no_code_of_a_users(tmp_path, monkeypatch):
    (tmp_path / "loud_policy.py").write_text("raise SystemExit('it ran')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert RouterConfig(policy="loud_policy:Policy").policy == "loud_policy:Policy"
    assert "loud_policy" not in sys.modules


class Scripted:
    """Does what a test says."""

    name = "scripted"
    answer = None

    def costs(self, context):
        return Scripted.answer(context)


class ScriptedTerms(Scripted):
    term_names = ("queue", "kv_wait")
    terms = Scripted.costs


class ScriptedHistory(Scripted):
    """Is told of each decision."""

    told = None

    def chosen(self, context, slot):
        ScriptedHistory.told(context, slot)


def router(kind):
    return RouterConfig(policy=f"{__name__}:{kind.__name__}")


@scenario(2, router(ScriptedHistory))
async def test_a_policy_with_a_history_is_told_every_decision(cluster, dispatcher, engines):
    told = []
    Scripted.answer = lambda context: np.zeros(len(context.eligible))
    ScriptedHistory.told = lambda context, slot: told.append((context.request_tokens, context.now_s, slot))
    times = []
    for number in range(4):
        await asyncio.sleep(1.0)
        times.append(asyncio.get_running_loop().time())
        async with dispatcher.open(make_request(f"r{number}", tuple(range(6 + number)))):
            pass
    decisions = dispatcher.latest_decisions(99)
    assert [decision.policy for decision in decisions] == ["scripted"] * 4
    assert [(tokens, now_s) for tokens, now_s, _ in told] == [(6 + n, now_s) for n, now_s in enumerate(times)]
    assert [f"w{slot + 1}" for _, _, slot in told] == [decision.worker for decision in decisions]


def _write(context):
    context.active_blocks[0] = 1


@pytest.mark.parametrize(
    ("kind", "answer", "said"),
    [
        (Scripted, lambda _: {}["x"], r"policy 'scripted' failed: KeyError\('x'\)"),
        (Scripted, lambda _: np.zeros(1), r"shape \(1,\), expected \(4,\): a number for each worker"),
        (Scripted, _write, "read-only"),
        (ScriptedTerms, lambda _: np.zeros((1, 4)), r"shape \(1, 4\), expected \(2, 4\)"),
        (Scripted, lambda _: np.full(4, np.nan), r"it gave worker \d+ cost nan; expected numbers"),
        (Scripted, lambda _: np.full(4, np.inf), r"cost inf; .*\(inf rules a worker out\)"),
        (ScriptedTerms, lambda _: np.full((2, 4), [[np.inf], [0.0]]), "queue inf, kv_wait 0;"),
        (ScriptedHistory, lambda _: np.zeros(4), r"ZeroDivisionError"),
    ],
)
def test_a_policy_that_fails_ends_the_request_with_its_name_and_nothing_else(kind, answer, said):
    Scripted.answer, ScriptedHistory.told = answer, lambda _, slot: slot / 0

    async def scene(cluster, dispatcher, engines):
        for number in range(2):
            with pytest.raises(PenstockError, match=said) as told:
                await dispatcher.open(make_request(f"r{number}")).__aenter__()
            assert told.value.http_status == 500
            dispatcher.check()
        assert not any(engine.submitted for engine in engines.values())
        assert cluster.figure("policy_failures_total", policy="scripted") == 2

    run_scenario(scene, config=router(kind))


@scenario(1, router(ScriptedTerms))
async def test_a_policy_that_fails_while_requests_are_held_ends_them_and_holds_up_nobody(
    cluster, dispatcher, engines
):
    asked = []

    def terms(context):
        asked.append(context)
        if len(asked) in {3, 4}:
            raise KeyError("x")
        terms = np.zeros((2, len(context.eligible)))
        terms[0] = 100.0 if len(asked) < 3 else 0.0
        return terms

    Scripted.answer = terms
    engines["w1"].report(waiting_requests=1)
    await asyncio.sleep(1)
    one, two = (asyncio.ensure_future(dispatcher.open(make_request(name)).__aenter__()) for name in "ab")
    await asyncio.sleep(10)
    with pytest.raises(PenstockError, match="policy 'scripted' failed"):
        await one
    await (await two).__aexit__(None, None, None)
