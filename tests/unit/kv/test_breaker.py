"""Tiers that fail turn themselves off with one warning, and return by themselves."""

import asyncio

import pytest

from penstock.core.errors import DeadlineExceeded, TransferError
from penstock.kv.block_store import CircuitBreaker, GuardedStore
from tests.support.slots import chain, content, targets

HASHES = chain(4)


class Store:
    """Loads what it is asked for, after `takes_s`, or fails."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.takes_s = 0.0
        self.calls = 0

    def locate(self, block_hashes):
        return len(block_hashes)

    async def load(self, block_hashes, targets, *, timeout_s=None):
        return await self._answer(block_hashes, timeout_s)

    async def store(self, block_hashes, sources, *, parent=None, timeout_s=None, on_copied=None):
        return await self._answer(block_hashes, timeout_s)

    async def _answer(self, block_hashes, timeout_s):
        self.calls += 1
        if timeout_s is not None and self.takes_s > timeout_s:
            await asyncio.sleep(timeout_s)
            raise DeadlineExceeded("too long")
        await asyncio.sleep(self.takes_s)
        if self.error is not None:
            raise self.error
        return len(block_hashes)


def guarded(**options) -> tuple[Store, GuardedStore]:
    store = Store()
    return store, GuardedStore(store, CircuitBreaker("disk", **options), timeout_s=1.0)


async def load(tier: GuardedStore) -> int:
    return await tier.load(HASHES, targets(4))


@pytest.mark.virtual
async def test_three_failures_in_a_row_turn_it_off_with_one_warning_and_it_returns(capsys):
    store, tier = guarded(failures_max=3, pause_s=1.0)
    for error in (TransferError("a"), None, TransferError("b"), TransferError("c")):
        store.error = error
        assert await load(tier) == (0 if error else 4)
    assert tier.breaker.is_on
    assert await load(tier) == 0
    assert not tier.breaker.is_on
    assert (tier.locate(HASHES), await load(tier), await tier.store(HASHES, content(HASHES))) == (0, 0, 0)
    assert store.calls == 5
    await asyncio.sleep(1.01)
    assert tier.locate(HASHES) == 4
    assert await load(tier) == 0, "the probe fails"
    await asyncio.sleep(1.01)
    assert tier.locate(HASHES) == 0, "the second pause is twice as long"
    store.error = None
    await asyncio.sleep(1.0)
    assert await tier.store(HASHES, content(HASHES)) == 4
    assert tier.breaker.is_on
    assert await load(tier) == 4
    text = "".join(capsys.readouterr())
    assert (text.count("kv_tier_off"), text.count("kv_tier_on")) == (1, 1)


@pytest.mark.virtual
async def test_a_store_that_hangs_for_a_minute_costs_three_deadlines_and_few_probes():
    store, tier = guarded(failures_max=3, pause_s=1.0)
    loop = asyncio.get_running_loop()
    store.takes_s, waited_s = 100.0, 0.0
    while loop.time() < 60:
        began_s = loop.time()
        await load(tier)
        waited_s += loop.time() - began_s
        await asyncio.sleep(0.1)
    assert waited_s <= 3 + 6
    store.takes_s = 0.0
    await asyncio.sleep(60)
    assert await load(tier) == 4


@pytest.mark.virtual
async def test_one_probe_at_a_time_and_a_cancelled_one_makes_room_for_another():
    store, tier = guarded(failures_max=1, pause_s=1.0)
    store.error = TransferError("gone")
    await load(tier)
    store.error, store.takes_s = None, 0.5
    await asyncio.sleep(1.01)
    async with asyncio.TaskGroup() as group:
        probe = group.create_task(load(tier))
        await asyncio.sleep(0)
        assert await load(tier) == 0
        assert tier.locate(HASHES) == 0
        probe.cancel()
    assert await load(tier) == 4
    assert tier.breaker.is_on


@pytest.mark.virtual
async def test_mistakes_of_the_caller_are_told_and_do_not_count():
    store, tier = guarded(failures_max=1)
    store.error = ValueError("a buffer of 3 bytes")
    with pytest.raises(ValueError, match="3 bytes"):
        await load(tier)
    assert tier.breaker.is_on


@pytest.mark.virtual
async def test_an_error_that_nobody_foresaw_counts_as_a_failure_and_the_tier_is_tried_again(capsys):
    store, tier = guarded(failures_max=1, pause_s=1.0)
    store.error = RuntimeError("no thread")
    assert await load(tier) == 0
    assert "no thread" in "".join(capsys.readouterr())
    await asyncio.sleep(1.01)
    assert await load(tier) == 0, "the probe fails"
    await asyncio.sleep(2.01)
    store.error = None
    assert await load(tier) == 4
