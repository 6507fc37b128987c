"""Decisions that are kept, explained and logged, beside a fleet that goes on changing."""

import asyncio
import json

import msgspec
import pytest

from penstock.core.errors import ConfigError
from penstock.core.types.events import BlockStored, Tier
from penstock.core.wire import pack_hashes
from penstock.router.config import ExplainConfig, RouterConfig
from penstock.router.dispatch.dispatcher import Dispatcher
from penstock.router.explanations import RouteReason, RoutingExplanation
from penstock.router.replay import RoutingReplay
from tests.support.manual_engine import ManualEngine
from tests.support.scene import HASHES, PROMPT, make_request, run_scenario, scenario, view


async def decide(dispatcher: Dispatcher, request_id: str, *prompt: tuple[int, ...]) -> RoutingExplanation:
    async with dispatcher.open(make_request(request_id, *prompt)):
        return dispatcher.explain(request_id)[-1]


async def store(engine: ManualEngine, start: int, stop: int, tier: Tier = Tier.DEVICE) -> None:
    parent = int(HASHES[start - 1]) if start else None
    event = BlockStored(
        block_hashes=pack_hashes(HASHES[start:stop]), parent_block_hash=parent, block_size=4, tier=tier
    )
    engine.step(events=[event])
    await asyncio.sleep(0.001)


@pytest.mark.parametrize(("tier", "left"), [(Tier.HOST, 1), (Tier.DISK, 13)])
@scenario()
async def test_what_takes_longer_to_fetch_than_to_compute_is_reserved_as_to_be_computed(
    cluster, dispatcher, engines, tier, left
):
    """A token of an unpriced worker takes 20 us to compute, 3.3 from the host and 26 from the disk."""

    await store(engines["w2"], 0, 2)
    await store(engines["w2"], 2, 5, tier)
    async with dispatcher.open(make_request()):
        assert view(dispatcher, "w2").reserved_prefill_tokens == left  # of 21, 8 of them on the device


@scenario(9, RouterConfig(explain=ExplainConfig(candidates_max=3)))
async def test_of_many_workers_the_cheapest_are_named_and_whoever_holds_most(cluster, dispatcher, engines):
    await store(engines["w9"], 0, 5)
    for number in range(1, 10):
        engines[f"w{number}"].report(queued_prefill_tokens=1000 * number, total_blocks=9999)
    await asyncio.sleep(1)
    decision = await decide(dispatcher, "a")
    assert [c.worker for c in decision.candidates] == ["w1", "w2", "w3", "w9"]
    assert (decision.num_candidates, decision.next_worker) == (9, "w2")
    assert decision.reason is RouteReason.SHORTER_PREFIX


@scenario(3, RouterConfig(policy="session"))
async def test_a_worker_that_got_its_session_s_request_is_told_so(cluster, dispatcher, engines):
    async def reason(request_id: str, session: str | None, tenant: str = "") -> RouteReason:
        request = make_request(request_id, session=session)
        async with dispatcher.open(msgspec.structs.replace(request, tenant=tenant)):
            return dispatcher.explain(request_id)[-1].reason

    assert await reason("new", "a") is RouteReason.NO_PREFIX
    assert await reason("again", "a") is RouteReason.SESSION
    assert await reason("other", "b") is RouteReason.NO_PREFIX
    assert await reason("guess", "a", "another") is RouteReason.NO_PREFIX, "a session is its tenant's own"
    assert await reason("guess again", "a", "another") is RouteReason.SESSION
    assert await reason("none", None) is RouteReason.NO_PREFIX
    for worker in ("w2", "w3"):
        cluster.kill(worker)
    await asyncio.sleep(0.001)
    assert await reason("alone", "a") is RouteReason.ONLY_WORKER


@scenario()
async def test_time_spent_is_taken_from_the_target_for_the_first_token(cluster, dispatcher, engines):
    async def targets(wait_s: float, *, answered: bool) -> float | None:
        request = msgspec.structs.replace(make_request("r"), slo_ttft_s=1.0)
        async with dispatcher.open(request) as stream:
            await asyncio.sleep(wait_s)
            if answered:
                worker = dispatcher.explain("r")[-1].worker
                engines[worker].emit("r", 1, cached_tokens=0)
                await anext(stream)
            return stream.score().context.slo_ttft_s

    assert await targets(0.25, answered=False) == pytest.approx(0.75)
    assert await targets(60.0, answered=False) == pytest.approx(0.1)
    assert await targets(0.25, answered=True) is None


@pytest.mark.parametrize(
    ("bound", "kept"), [({"decisions_max": 3}, 3), ({"bytes_max": 4500}, 3), ({"decisions_max": 0}, 0)]
)
def test_old_decisions_go(bound, kept):
    async def scene(cluster, dispatcher, engines):
        for number in range(9):
            async with dispatcher.open(make_request(f"r-{number}")):
                dispatcher.check()
        expected = [f"r-{number}" for number in range(9 - kept, 9)]
        assert [d.request_id for d in dispatcher.latest_decisions(99)] == expected
        assert dispatcher.explain("r-5") == ()
        assert len(dispatcher.explain("r")) == kept

    run_scenario(scene, 2, RouterConfig(explain=ExplainConfig(**bound)))


@scenario()
async def test_decisions_are_found_by_request_and_by_answer(cluster, dispatcher, engines):
    for request_id in ("chat-a-0", "chat-a-1", "chat-b-0", "chat-a-12", "plain"):
        async with dispatcher.open(make_request(request_id)):
            pass

    def found(request_id: str) -> list[str]:
        return [explanation.request_id for explanation in dispatcher.explain(request_id)]

    assert found("chat-a") == ["chat-a-0", "chat-a-1", "chat-a-12"]
    assert found("chat-a-1") == ["chat-a-1"]
    assert found("plain") == ["plain"]
    assert found("chat") == found("chat-a-") == found("") == [], "that is nobody's id"


async def traffic(cluster, dispatcher, engines):
    """Prompts that share beginnings, of three sessions, some of them open together."""
    for number in range(30):
        prompt = PROMPT[: 5 + number % 16] + (number % 7,) * (number % 5)
        one, other = (
            make_request(f"a{number}", prompt, session=f"s{number % 3}"),
            make_request(f"b{number}", PROMPT[::-1]),
        )
        async with dispatcher.open(one), dispatcher.open(other):
            await asyncio.sleep(0.01 * (number % 4))


POLICIES = [
    "kv", "least-loaded", "power-of-two", "round-robin", "random", "session",
    "benchmarks.baselines.product:Product", "benchmarks.baselines.explore_exploit:ExploreExploit",
]  # fmt: skip


@pytest.mark.parametrize("policy", POLICIES)
def test_a_log_says_all_that_its_decisions_went_by(policy, decision_lines):
    run_scenario(traffic, config=RouterConfig(policy=policy))
    replayed = list(RoutingReplay().run(decision_lines()))
    assert len(replayed) == 60
    assert [one.request_id for one in replayed if one.differs] == []
    assert len({one.worker for one in replayed}) >= 2


@pytest.mark.parametrize("bound", [{"sessions_max": 1}, {"session_idle_s": 0.015}])
def test_sessions_are_forgotten_again_as_they_were(bound, decision_lines):
    run_scenario(traffic, config=RouterConfig(policy="session", **bound))
    assert [one.request_id for one in RoutingReplay().run(decision_lines()) if one.differs] == []
    as_usual = (json.loads(line) | dict.fromkeys(bound, 1 << 16) for line in decision_lines())
    assert any(one.differs for one in RoutingReplay().run(map(json.dumps, as_usual))), (
        "or nothing was forgotten"
    )


@pytest.mark.parametrize(("share", "least", "most"), [(0.0, 0, 0), (0.5, 15, 45), (1.0, 60, 60)])
def test_a_share_of_the_decisions_is_logged(share, least, most, decision_lines):
    run_scenario(traffic, config=RouterConfig(explain=ExplainConfig(logged_share=share)))
    assert least <= len(decision_lines()) <= most


def test_lines_that_are_no_decisions_are_counted_and_broken_ones_named(decision_lines):
    run_scenario(traffic)
    whole = decision_lines()[0]
    replay = RoutingReplay()
    assert len(list(replay.run(["", "10:00 worker_lost", '{"event": "worker_lost"}', whole, "[]"]))) == 1
    assert replay.other_lines == {"text": 2, "event": 1}
    broken = json.loads(whole)
    del broken["context"]["turn"]
    with pytest.raises(ConfigError, match=r"line 2: .*another version: turn"):
        list(RoutingReplay().run([whole, json.dumps(broken)]))
    for changed, said in (
        ({"eligible": ["bool", [2], True]}, "policy 'kv' failed: ValueError.*an entry for each slot"),
        ({"request_tokens": "x"}, "policy 'kv' failed"),
        ({"eligible": ["bool", [10**13], True]}, "eligible: is no array as this version writes them"),
        ({"eligible": ["bool", [10**30], True]}, "eligible: is no array"),
    ):
        broken = json.loads(whole)
        broken["context"] |= changed
        with pytest.raises(ConfigError, match=f"line 1: .*{said}"):
            list(RoutingReplay().run([json.dumps(broken)]))
    broken = json.loads(whole) | {"slot": "one"}
    with pytest.raises(ConfigError, match=r"line 1: .*slot"):
        list(RoutingReplay().run([json.dumps(broken)]))
