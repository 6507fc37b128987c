"""Tenants' limits over several frontends: real workers and dispatchers in one process, on virtual time."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import pytest
from structlog.testing import capture_logs

from penstock.core.types.load import PeerCount, TenantCount
from penstock.frontend.errors import RateLimitError
from penstock.frontend.limits.keys import TenantConfig, hash_of
from penstock.frontend.limits.tenants import (
    BUSY_S,
    IDLE_S,
    PAUSE_S,
    RequestUse,
    TenantKeys,
    TenantUsage,
    share_limits,
)
from penstock.router.dispatch.dispatcher import ANSWER_S_MAX, PASSED_OVER_S
from penstock.runtime.requests.memory import _Link
from tests.support.cluster import MemoryCluster
from tests.support.manual_engine import ManualEngine

pytestmark = pytest.mark.virtual

TICK_S = 0.01


class SharingFrontend:
    """One frontend of a deployment, with the tenant `t`."""

    def __init__(self, config: TenantConfig) -> None:
        self.tenants = TenantKeys({"t": config.model_copy(update={"keys": (hash_of("key"),)})})
        tenant = self.tenants.of_key(b"key")
        assert tenant is not None
        assert tenant.usage is not None
        self.usage: TenantUsage = tenant.usage
        self.exchanges = 0
        self.held: list[RequestUse] = []
        self._stack = AsyncExitStack()

    async def start(self, cluster: MemoryCluster) -> None:
        dispatcher = await self._stack.enter_async_context(cluster.dispatcher())
        await dispatcher.looked()

        async def count(counts: Mapping[str, TenantCount]) -> Mapping[str, PeerCount]:
            self.exchanges += 1
            return await dispatcher.count_tenants(counts)

        task = asyncio.ensure_future(share_limits(self.tenants, count))
        self._stack.callback(task.cancel)

    async def end(self) -> None:
        await self._stack.aclose()

    def ask(self, most: int = 1) -> int:
        """Begin as many requests as are admitted, at most so many."""
        before = len(self.held)
        with suppress(RateLimitError):
            for _ in range(most):
                self.held.append(self.usage.admit(now_s()))
        self.tenants.check()
        return len(self.held) - before

    def finish(self) -> None:
        for use in self.held:
            use.end(now_s())
        self.held.clear()


def now_s() -> float:
    return asyncio.get_running_loop().time()


@asynccontextmanager
async def deployment(
    config: TenantConfig, *, frontends: int = 2, workers: int = 1
) -> AsyncIterator[tuple[MemoryCluster, list[SharingFrontend]]]:
    async with MemoryCluster() as cluster, AsyncExitStack() as stack:
        for number in range(1, workers + 1):
            await cluster.start(f"w{number}", ManualEngine())
        each = [SharingFrontend(config) for _ in range(frontends)]
        for frontend in each:
            stack.push_async_callback(frontend.end)
            await frontend.start(cluster)
        await asyncio.sleep(0.01)
        yield cluster, each


async def flood(frontends: list[SharingFrontend], seconds: float) -> int:
    """Send far too many short requests to each frontend; returns how many were admitted."""
    admitted, end_s = 0, now_s() + seconds
    while now_s() < end_s:
        for frontend in frontends:
            admitted += frontend.ask(3)
            frontend.finish()
        await asyncio.sleep(TICK_S)
    return admitted


def held(frontends: list[SharingFrontend]) -> int:
    return sum(len(frontend.held) for frontend in frontends)


@pytest.mark.parametrize("frontends", [1, 3])
async def test_a_rate_holds_over_all_frontends_after_a_burst_at_each(frontends: int) -> None:
    async with deployment(TenantConfig(requests_per_s=20), frontends=frontends) as (_, each):
        first = await flood(each, 10.0)
        assert 20 * 10 <= first <= 20 * (10 + 1) + 20 * (frontends - 1) + 1
        assert 20 * 10 - 10 <= await flood(each, 10.0) <= 20 * 10 + 10, "bursts are paid for"


async def test_tokens_of_other_frontends_are_a_debt() -> None:
    async with deployment(TenantConfig(tokens_per_min=6000), frontends=3) as (_, each):
        for frontend in each:
            (use,) = [frontend.usage.admit(now_s())]
            use.charge(5900, 300, lambda: (5900, 100), now_s())
            use.end(now_s())
        await asyncio.sleep(2 * IDLE_S)
        for frontend in each:
            level = frontend.tenants.uses()[0].tokens_left
            assert level is not None
            assert level == pytest.approx(6000 - 3 * 6000 + 100 * now_s(), abs=300)
            assert frontend.ask() == 0
        await asyncio.sleep(125.0)
        assert each[0].ask() == 1


async def test_free_places_are_shared_and_none_is_left_over() -> None:
    async with deployment(TenantConfig(concurrency=64)) as (_, each):
        for frontend in each:
            frontend.ask()
        await asyncio.sleep(2 * IDLE_S)  # each knows that the other has some
        for _ in range(100):
            for frontend in each:
                frontend.ask()
                assert held(each) <= 64 + 1
            await asyncio.sleep(2 * PAUSE_S)
        assert held(each) >= 64
        with pytest.raises(RateLimitError, match=r"6[45] of its requests are in flight at 2 frontends"):
            each[0].usage.admit(now_s())
        each[0].finish()
        await asyncio.sleep(BUSY_S + 2 * PAUSE_S)
        assert each[1].ask(64) >= (64 - len(each[1].held)) // 2, "a share at once, the rest soon"


async def test_another_worker_counts_when_one_dies() -> None:
    async with deployment(TenantConfig(requests_per_s=20, concurrency=8), workers=2) as (cluster, each):
        await flood(each, 10.0)
        cluster.kill("w1")
        await cluster.start("w1", ManualEngine())  # its id is new
        assert 20 * 10 - 10 <= await flood(each, 10.0) <= 20 * 10 + 20
        cluster.kill("w2")
        assert 20 * 10 - 10 <= await flood(each, 10.0) <= 20 * 10 + 20


async def test_workers_of_an_older_version_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = _Link.count_tenants

    def older(link: _Link, counts: Mapping[str, TenantCount], call_id: int) -> None:
        if link.worker_id != 3:
            return  # an unknown message is skipped
        answer(link, counts, call_id)

    monkeypatch.setattr(_Link, "count_tenants", older)
    async with deployment(TenantConfig(requests_per_s=20), workers=3) as (_, each):
        await flood(each, 2 * ANSWER_S_MAX + 3 * BUSY_S)
        admitted = await flood(each, PASSED_OVER_S - 3.0)
        assert admitted <= 20 * (PASSED_OVER_S - 3.0) + 20
        total = await flood(each, 60.0)
        assert total <= 20 * 60 * 1.5, "they are asked again now and then"


async def test_without_a_worker_that_counts_each_frontend_counts_alone_and_owes_nothing_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = _Link.count_tenants
    monkeypatch.setattr(_Link, "count_tenants", lambda *_: None)
    async with deployment(TenantConfig(requests_per_s=20)) as (_, each):
        with capture_logs() as logs:
            assert await flood(each, 20.0) >= 2 * 20 * 20
            monkeypatch.setattr(_Link, "count_tenants", answer)
            await flood(each, PASSED_OVER_S + 2.0)
        events = [log["event"] for log in logs if log["event"].startswith("limits_")]
        assert events.count("limits_not_shared") == events.count("limits_shared") == 2
        assert 20 * 10 - 10 <= await flood(each, 10.0) <= 20 * 10 + 20


async def test_idle_frontends_exchange_once_a_second_and_those_without_limits_never() -> None:
    async with deployment(TenantConfig(concurrency=5)) as (_, each):
        before = each[0].exchanges
        await asyncio.sleep(100 * IDLE_S)
        assert 90 <= each[0].exchanges - before <= 101
        before = each[0].exchanges
        await flood(each, 10.0)
        assert each[0].exchanges - before <= 10.0 / PAUSE_S + 1
    async with deployment(TenantConfig()) as (_, each):
        assert await flood(each, 10.0) > 1000
        assert each[0].exchanges == 0
