"""What requests ask of their KV after their end: what stays, until when, and on every engine."""

import asyncio
import math

import pytest
from msgspec.structs import replace

from penstock.core.errors import RequestError
from penstock.core.types.requests import KvRetention
from penstock.engine.mock import MockConfig, mock_engine
from penstock.engine.runner import RunnerInfo
from penstock.kv.eviction import BlockUse, UseKind
from penstock.kv.pool import BlockPool
from penstock.kv.reference_pool import tenant_number
from penstock.kv.retention import Retention, RetentionConfig
from penstock.sim.loop import run_virtual
from penstock.testing.engines.probe import EngineProbe, make_request
from tests.support.manual_clock import ManualClock

SHAPE = RunnerInfo(num_blocks=32, block_size=4, context_length=128, vocab_size=1000, eos_token_ids=(2,))


def request_with(retention=None, **fields):
    return replace(make_request("r", [1]), retention=retention, **fields)


def make_retention(pool=None, clock=None, **config):
    return Retention(pool or BlockPool(8, 4, "seconds"), RetentionConfig(**config), clock or ManualClock())


@pytest.mark.parametrize(
    ("asked", "use"),
    [
        (None, (0, math.inf)),
        (KvRetention(priority=-3), (-3, math.inf)),
        (KvRetention(priority=2), (2, 60.0)),
        (KvRetention(priority=0, ttl_s=5), (0, 5.0)),
        (KvRetention(priority=7, ttl_s=300), (7, 300.0)),
    ],
)
def test_a_priority_above_0_always_ends(asked, use):
    retention = make_retention(ttl_s=60)
    request = request_with(asked, tenant="a")
    assert retention.use(request) == BlockUse(UseKind.OTHER, *use, tenant_number("a"))


def test_agents_and_sessions_are_kinds_of_their_own():
    retention = make_retention()
    kinds = [
        retention.use(request_with(session=session, follows_tool=is_tool)).kind
        for session in (None, "a")
        for is_tool in (False, True)
    ]
    assert kinds == [UseKind.OTHER, UseKind.TOOL, UseKind.SESSION, UseKind.TOOL]


def test_a_ttl_past_the_workers_bound_is_refused():
    with pytest.raises(
        RequestError, match=r"kv_retention\.ttl_s: must be <= 100, retention\.ttl_s_max, got 101"
    ):
        make_retention(ttl_s_max=100).arrive(request_with(KvRetention(priority=1, ttl_s=101)))


@pytest.mark.parametrize(("pause_s", "cached_tokens"), [(50, 36), (70, 0)])
def test_an_engine_keeps_the_prefix_through_a_tool_call_and_no_longer(pause_s, cached_tokens):
    async def main():
        agent = replace(make_request("a", range(40), max_tokens=1), retention=KvRetention(priority=1))
        async with EngineProbe(mock_engine(SHAPE, MockConfig(speedup=1e6))) as probe:
            await probe.run(agent)
            for number in range(12):
                await asyncio.sleep(pause_s / 12)
                other = range(100 + 40 * number, 140 + 40 * number)
                await probe.run(make_request(f"o{number}", other, max_tokens=1))
            answers = await probe.run(make_request("b", range(40), max_tokens=1))
            return answers[0]

    answer = run_virtual(main())
    assert answer.cached_tokens == cached_tokens
