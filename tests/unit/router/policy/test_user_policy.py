"""Policies from elsewhere: by module and class, by entry point, and what is said where there is none."""

import asyncio
import sys
from pathlib import Path

import numpy as np
import pytest

from penstock.core.errors import ConfigError, PenstockError
from penstock.core.ids import RequestId
from penstock.core.types.load import WorkerLoad
from penstock.core.types.requests import Request, SamplingParams
from penstock.core.wire import pack_tokens
from penstock.router.config import RouterConfig
from penstock.router.policy.policies import POLICIES, choose, make_policy
from penstock.sim.loop.loop import run_virtual
from penstock.testing.routing_policy import RoutingPolicySuite, some_contexts
from tests.support.cluster import MemoryCluster
from tests.support.manual_engine import ManualEngine
from tests.support.scene import make_request, run_scenario

EXAMPLES = Path(__file__).parents[4] / "examples"
EXAMPLE = "routing_policy:QuietestHolder"


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield
    sys.modules.pop("routing_policy", None)


class TestTheExample(RoutingPolicySuite):
    def make(self):
        return make_policy(EXAMPLE)


def test_the_example_is_short_and_does_what_it_says():
    assert len((EXAMPLES / "routing_policy.py").read_text().splitlines()) <= 60
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
    ("name", "message"),
    [
        ("routing_policy.at_all:Policy", "'routing_policy.at_all' cannot be imported: No module named"),
        ("routing_policy:QuietestHoldr", "has no 'QuietestHoldr'; did you mean 'QuietestHolder'"),
        ("routing_policy:SHARE", "has no 'SHARE'"),
        ("routing_policy:RoutingContext", "it could not be made without arguments"),
        ("pathlib:Path", "has no name and no costs|has no costs"),
    ],
)
def test_what_is_wrong_with_a_policys_code_is_said_when_a_router_starts(name, message):
    config = RouterConfig.parse({"policy": name}, source="graph.yaml")
    with pytest.raises(ConfigError, match=message):
        config.new_policy()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("roundrobin", "'roundrobin' is unknown; did you mean 'round-robin'"),
        ("nowhere.at_all:Policy", "there is no module 'nowhere'"),
        ("a b:Policy", "expected `package.module:Class`"),
        ("routing_policy:", "expected `package.module:Class`"),
    ],
)
def test_what_is_wrong_with_a_name_is_said_before_anything_starts(name, message):
    with pytest.raises(ConfigError, match=message):
        RouterConfig.parse({"policy": name}, source="graph.yaml")


def test_checking_a_configuration_runs_no_code_of_a_users(tmp_path, monkeypatch):
    (tmp_path / "loud_policy.py").write_text("raise SystemExit('it ran')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert RouterConfig(policy="loud_policy:Policy").policy == "loud_policy:Policy"
    assert "loud_policy" not in sys.modules


HISTORY = """
import numpy as np

told = []


class Spreading:
    name = "spreading"

    def __init__(self):
        self.counts = {}

    def costs(self, context):
        return np.array([float(self.counts.get(slot, 0)) for slot in range(len(context.eligible))])

    def chosen(self, context, slot):
        self.counts[slot] = self.counts.get(slot, 0) + 1
        told.append((context.request_tokens, context.now_s, slot))
"""


def test_a_policy_with_a_history_is_told_every_decision(tmp_path, monkeypatch):
    (tmp_path / "spreading.py").write_text(HISTORY)
    monkeypatch.syspath_prepend(str(tmp_path))

    async def main():
        loop = asyncio.get_running_loop()
        async with MemoryCluster() as cluster, cluster.dispatcher(config) as dispatcher:
            for name in ("one", "two"):
                await cluster.start(name, ManualEngine())
            await asyncio.sleep(0.01)
            times = []
            for number in range(4):
                await asyncio.sleep(1.0)
                times.append(loop.time())
                async with dispatcher.open(request(number)):
                    pass
            return times, [decision.policy for decision in dispatcher.latest_decisions(99)]

    config = RouterConfig(policy="spreading:Spreading")
    times, names = run_virtual(main())
    told = sys.modules.pop("spreading").told
    assert names == ["spreading"] * 4
    assert [(tokens, now_s) for tokens, now_s, _ in told] == [(6 + n, now_s) for n, now_s in enumerate(times)]
    assert sorted(slot for _, _, slot in told) == [0, 0, 1, 1]


def request(number):
    return Request(
        request_id=RequestId(f"r{number}"),
        model="tiny",
        token_ids=pack_tokens(range(6 + number)),
        sampling=SamplingParams(max_tokens=5),
        salt=b"tiny-1",
    )


class _Broken:
    """Does what it is told to."""

    name = "broken"

    def __init__(self, costs):
        self._costs = costs

    def costs(self, context):
        return self._costs(context)


class _BrokenTerms(_Broken):
    term_names = ("queue", "kv_wait")
    terms = _Broken.costs


class _BrokenHistory(_Broken):
    def __init__(self):
        super().__init__(lambda context: np.zeros(len(context.eligible)))

    def chosen(self, context, slot):
        return slot / 0


def _write(context):
    context.active_blocks[0] = 1


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (_Broken(lambda _: {}["x"]), r"policy 'broken' failed: KeyError\('x'\)"),
        (_Broken(lambda _: np.zeros(1)), r"shape \(1,\), expected \(4,\): a number for each worker"),
        (_Broken(lambda _: None), r"shape \(\), expected \(4,\)"),
        (_Broken(_write), "read-only"),
        (_BrokenTerms(lambda _: np.zeros((1, 4))), r"shape \(1, 4\), expected \(2, 4\)"),
        (_Broken(lambda _: np.full(4, np.nan)), r"it gave worker \d+ cost nan; expected numbers"),
        (_Broken(lambda _: np.array([-np.inf, 1, 2, 3])), r"cost -inf"),
        (_Broken(lambda _: np.full(4, np.inf)), r"cost inf; .*\(inf rules a worker out\)"),
        (_BrokenTerms(lambda _: np.full((2, 4), [[np.inf], [0.0]])), "queue inf, kv_wait 0;"),
        (_BrokenTerms(lambda _: np.full((2, 4), [[0.5], [np.nan]])), "queue 0.5, kv_wait nan;"),
        (_BrokenHistory(), r"ZeroDivisionError"),
    ],
)
def test_a_policy_that_fails_ends_the_request_with_its_name_and_nothing_else(policy, said, monkeypatch):
    monkeypatch.setitem(POLICIES, "broken", lambda: policy)

    async def scene(cluster, dispatcher, engines):
        for number in range(2):
            with pytest.raises(PenstockError, match=said) as told:
                await dispatcher.open(make_request(f"r{number}")).__aenter__()
            assert told.value.http_status == 500
            dispatcher.check()
        assert not any(engine.submitted for engine in engines.values())
        failures = dispatcher._shared.metrics.policy_failures.labels("broken")
        assert failures._value.get() == 2

    run_scenario(scene, config=RouterConfig(policy="broken"))


def test_a_policy_that_rules_workers_out_holds_requests_for_the_others(monkeypatch):
    waits = [0.0, np.inf, 0.0]

    def terms(context):
        terms = np.zeros((2, len(context.eligible)))
        terms[0, : len(waits)] = waits
        terms[1, 2:] = np.inf
        return terms

    monkeypatch.setitem(POLICIES, "ruling", lambda: _BrokenTerms(terms))

    async def scene(cluster, dispatcher, engines):
        dispatcher._shared.fleet.loads.report(0, WorkerLoad(waiting_requests=1))
        waits[0] = 100.0  # the others have nobody waiting, and may not get it
        one = asyncio.ensure_future(dispatcher.open(make_request("a")).__aenter__())
        await asyncio.sleep(10)
        assert not one.done()
        dispatcher.check()
        waits[0] = 0.0
        await asyncio.sleep(10)
        await (await one).__aexit__(None, None, None)
        assert [name for name, engine in engines.items() if engine.submitted] == ["w1"]

    run_scenario(scene, 3, RouterConfig(policy="ruling"))


def test_a_policy_that_fails_while_requests_are_held_ends_them_and_holds_up_nobody(monkeypatch):
    prices = []

    def terms(context):
        prices.append(context)
        if len(prices) in {3, 4}:
            raise KeyError("x")
        terms = np.zeros((2, len(context.eligible)))
        terms[0] = 100.0 if len(prices) < 3 else 0.0
        return terms

    monkeypatch.setitem(POLICIES, "broken", lambda: _BrokenTerms(terms))

    async def scene(cluster, dispatcher, engines):
        dispatcher._shared.fleet.loads.report(0, WorkerLoad(waiting_requests=1))
        one, two = (asyncio.ensure_future(dispatcher.open(make_request(name)).__aenter__()) for name in "ab")
        await asyncio.sleep(10)
        with pytest.raises(PenstockError, match="policy 'broken' failed"):
            await one
        await (await two).__aexit__(None, None, None)

    run_scenario(scene, 1, RouterConfig(policy="broken"))
