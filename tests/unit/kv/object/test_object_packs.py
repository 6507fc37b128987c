"""Packs in an object store: what one writer stored any other loads, or it is a miss."""

import asyncio
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import obstore
import pytest
from obstore.store import MemoryStore

from penstock.core.errors import ConfigError, DeadlineExceeded, TransferError
from penstock.kv.breaker import CircuitBreaker
from penstock.kv.guarded import BlockStore, GuardedStore
from penstock.kv.namespace import Namespace
from penstock.kv.object.config import PacksConfig
from penstock.kv.object.packs import ObjectPacks
from penstock.transfer.storage.packs import head_bytes
from tests.support.slots import BLOCK_BYTES, NAMESPACE, chain, content, targets

HASHES = chain(6)
BLOCKS = content(HASHES)
FOLDER = f"kv/{NAMESPACE.digest.hex()}"
FOUR = 4 * BLOCK_BYTES


def make(store: object, namespace: Namespace = NAMESPACE, block_bytes: int = BLOCK_BYTES, **config: Any):
    options = {"gather_s": 0.0, "pack_bytes": FOUR, "refresh_s": 1000.0, "retries": 0} | config
    return ObjectPacks(store, block_bytes, namespace, PacksConfig(**options))


def listed(store: MemoryStore) -> dict[str, bytes]:
    rows = sorted(obstore.list(store).collect(), key=lambda row: row["last_modified"])
    return {row["path"]: bytes(obstore.get(store, row["path"]).bytes()) for row in rows}


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():  # noqa: ASYNC110 - a time limit is around it
        await asyncio.sleep(0)


async def filled(store: object, **config: Any) -> None:
    async with make(store, **config) as packs:
        assert await packs.store(HASHES, BLOCKS) == len(HASHES)


@pytest.mark.parametrize("block_bytes", [100, 4096, BLOCK_BYTES, 10_000])
async def test_what_one_writer_stored_another_loads(block_bytes: int):
    store, blocks = MemoryStore(), content(HASHES, block_bytes)
    async with make(store, block_bytes=block_bytes) as writer:
        protocol: BlockStore = writer
        assert protocol.locate(HASHES) == 0
        assert await writer.store(HASHES, blocks) == 6
        async with make(store, block_bytes=block_bytes) as reader:
            await reader.refresh()
            for packs in (writer, reader):
                into = targets(7, block_bytes)
                assert packs.locate(chain(7)) == 6
                assert await packs.load(chain(7), into) == 6
                assert (into[:6] == blocks).all()
                assert not into[6].any()
                packs.check()
            assert (reader.num_cached, reader.counts.loaded, writer.counts.stored) == (6, 6, 6)


async def test_neighbours_are_got_by_one_request(monkeypatch: pytest.MonkeyPatch):
    calls = []
    get = obstore.get_range_async

    def noted(store, key, **options):
        calls.append((options["start"] - head_bytes(6), options["end"] - options["start"]))
        return get(store, key, **options)

    async with make(MemoryStore(), pack_bytes=1 << 20) as packs:
        await packs.store(HASHES, BLOCKS)
        monkeypatch.setattr(obstore, "get_range_async", noted)
        assert await packs.load(HASHES[1:5], targets(4)) == 4
        assert await packs.load(HASHES[[0, 2, 3]], targets(3)) == 3
    size = BLOCK_BYTES
    assert calls[0] == (size, FOUR)
    assert sorted(calls[1:]) == [(0, size), (2 * size, 2 * size)]


async def test_the_oldest_packs_beyond_the_budget_are_deleted_in_all_namespaces():
    store = MemoryStore()
    other = Namespace(model_digest="old", dtype="bfloat16", layout="layers", block_size=4)
    obstore.put(store, "kv/README", b"not ours")
    obstore.put(store, f"elsewhere/{FOLDER}/{'0' * 32}", b"x" * 100_000)
    async with make(store, other) as old:
        await old.store(HASHES[:4], BLOCKS[:4])
    budget = 2 * (head_bytes(4) + FOUR)
    async with make(store, budget_bytes=budget) as packs, make(store, budget_bytes=budget) as two:
        for first in (1, 2):
            await packs.store(chain(4, first), content(chain(4, first)))
        await two.refresh()
        assert sorted(await asyncio.gather(packs.collect(), two.collect()))[1] == 1
        assert len(listed(store)) == 4
        assert await packs.load(chain(4, 1), targets(4)) == 4
        await packs.store(chain(4, 3), content(chain(4, 3)))
        assert await two.collect() == 1
        assert await packs.load(chain(4, 1), targets(4)) == 0
        await two.refresh()
        assert [two.locate(chain(4, first)) for first in (1, 2, 3)] == [0, 4, 4]
        assert {"kv/README"} <= set(listed(store))


async def test_packs_beyond_their_age_are_deleted(monkeypatch: pytest.MonkeyPatch):
    store = MemoryStore()
    now = datetime.now(UTC)
    async with make(store, age_max_s=3600.0) as packs:
        await packs.store(HASHES, BLOCKS)
        assert await packs.collect() == 0
        later = (now + timedelta(hours=2)).timestamp()
        monkeypatch.setattr("penstock.kv.object.catalogue.wall_time_s", lambda: later)
        assert await packs.collect() == 2
        assert (packs.locate(HASHES), packs.counts.packs_deleted) == (0, 2)
    assert not listed(store)


async def test_packs_of_other_writers_are_found_without_asking():
    store = MemoryStore()
    async with make(store, refresh_s=0.01) as reader:
        await filled(store)
        await until(lambda: reader.locate(HASHES) == 6)


async def test_more_than_may_wait_is_not_stored():
    async with make(MemoryStore(), storing_max_bytes=2 * BLOCK_BYTES) as packs:
        assert await packs.store(HASHES, BLOCKS) == 2
        assert packs.counts.refused == 4
        assert await packs.store(HASHES, BLOCKS) == 4, "once they are put there is room again"


class Sick:
    """obstore, whose calls fail or hang where they are told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.error: Exception | None = None
        self.hangs = False
        for name in ("get_range_async", "put_async"):
            monkeypatch.setattr(obstore, name, self._spoiled(getattr(obstore, name)))

    def _spoiled(self, call):
        def spoiled(*args, **options):
            future = asyncio.get_running_loop().create_future()
            if self.hangs:
                return future
            if self.error is not None:
                future.set_exception(self.error)
                return future
            return call(*args, **options)

        return spoiled


@pytest.mark.parametrize(
    "error",
    [
        obstore.exceptions.GenericError("500"),
        obstore.exceptions.PermissionDeniedError("403"),
        ConnectionResetError("gone"),
        FileNotFoundError("NoSuchBucket"),
    ],
)
async def test_errors_of_the_store_turn_the_tier_off_with_one_warning(monkeypatch, capsys, error: Exception):
    sick, breaker = Sick(monkeypatch), CircuitBreaker("object", failures_max=2, pause_s=0.0001)
    async with make(MemoryStore()) as packs:
        tier = GuardedStore(packs, breaker, timeout_s=5.0)
        assert await tier.store(HASHES[:4], BLOCKS[:4]) == 4
        sick.error = error
        with pytest.raises(TransferError, match=str(error)):
            await packs.load(HASHES[:4], targets(4))
        with pytest.raises(TransferError, match=str(error)):
            await packs.store(HASHES, BLOCKS)
        for _ in range(2):
            assert await tier.load(HASHES[:4], targets(4)) == 0
            assert await tier.store(HASHES, BLOCKS) == 0
        assert not breaker.is_on
        sick.error = None
        async with asyncio.timeout(10):
            while await tier.store(HASHES, BLOCKS) < 6:
                pass
        assert await tier.load(HASHES, targets(6)) == 6
        assert breaker.is_on
        packs.check()
    text = "".join(capsys.readouterr())
    assert (text.count("kv_tier_off"), text.count("kv_tier_on")) == (1, 1), json.dumps(text)


async def test_a_store_that_hangs_keeps_nobody_beyond_the_deadline(monkeypatch: pytest.MonkeyPatch):
    sick = Sick(monkeypatch)
    monkeypatch.setattr("penstock.kv.object.packs._CLOSE_S", 0.01)
    async with make(MemoryStore()) as packs:
        await packs.store(HASHES[:4], BLOCKS[:4])
        sick.hangs = True
        into = targets(4)
        with pytest.raises(DeadlineExceeded, match="no answer within"):
            await packs.load(HASHES[:4], into, timeout_s=0.01)
        sources = BLOCKS.copy()
        with pytest.raises(DeadlineExceeded, match="no answer within"):
            await packs.store(HASHES, sources, timeout_s=0.01)
        sources[:] = 0
        sick.hangs = False
        assert await packs.load(HASHES[:4], targets(4)) == 4, "what hung holds no request for ever"
        assert not into.any()
        sick.hangs = True
        other = chain(2, 9)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(packs.store(other, content(other)))
            await asyncio.sleep(0)
            task.cancel()
        packs.check()


async def test_loads_do_not_wait_behind_puts_that_hang(monkeypatch: pytest.MonkeyPatch):
    sick = Sick(monkeypatch)
    monkeypatch.setattr("penstock.kv.object.packs._CLOSE_S", 0.01)
    async with make(MemoryStore(), requests=1) as packs:
        await packs.store(HASHES[:4], BLOCKS[:4])
        sick.hangs = True
        with pytest.raises(DeadlineExceeded):
            await packs.store(HASHES, BLOCKS, timeout_s=0.01)
        sick.hangs = False
        assert await packs.load(HASHES[:4], targets(4), timeout_s=20.0) == 4
        assert await packs.store(HASHES, BLOCKS) == 4, "the put may still come to its end"


async def test_sources_may_change_once_a_store_gave_up():
    store = MemoryStore()
    async with make(store, gather_s=0.05) as packs:
        sources = BLOCKS.copy()
        with pytest.raises(DeadlineExceeded):
            await packs.store(HASHES[:2], sources[:2], timeout_s=0.0)
        sources[:] = 0
        await until(lambda: packs.locate(HASHES) == 2)
        into = targets(2)
        assert await packs.load(HASHES[:2], into) == 2
        assert (into == BLOCKS[:2]).all()


async def test_what_waits_is_put_when_it_is_closed():
    store = MemoryStore()
    async with make(store, gather_s=1000.0) as packs:
        with pytest.raises(DeadlineExceeded):
            await packs.store(HASHES[:2], BLOCKS[:2], timeout_s=0.0)
    async with make(store) as packs:
        await packs.refresh()
        assert packs.locate(HASHES) == 2


@pytest.mark.parametrize(
    ("config", "text"),
    [({"requests": 0}, "requests must be above 0; got 0"), ({"retries": -1}, "retries must be >= 0; got -1")],
)
def test_settings_out_of_bounds_are_refused(config, text):
    with pytest.raises(ConfigError, match=text):
        PacksConfig(**config)
