"""Regions in an object store: how they are cut into objects, what is got and put, what is refused."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import obstore
import pytest

from penstock.core.errors import ChecksumMismatch, TransferError, TransferRefused
from penstock.transfer import ObjectRegion, TransferAgent, TransferConfig, TransferOp
from penstock.transfer.storage.object import ObjectStorage
from penstock.transfer.storage.packs import head_bytes

MIB, BLOCK = 1 << 20, 4096
READ, WRITE = TransferOp.READ, TransferOp.WRITE


class _Calls:
    """obstore, with every call noted down."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[str] = []
        for name in ("get_range_async", "put_async"):
            monkeypatch.setattr(obstore, name, self._noting(name, getattr(obstore, name)))

    def _noting(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(store: object, key: str, *data: Any, **options: Any) -> Any:
            size = len(data[0]) if data else options["end"] - options["start"]
            self.seen.append(f"{name[:3]} {key} {size}")
            return call(store, key, *data, **options)

        return noted


@asynccontextmanager
async def _play(region: ObjectRegion) -> AsyncIterator[tuple[TransferAgent, Any, Any]]:
    transport = ObjectStorage(requests=4, request_timeout_s=5, retries=0)
    async with TransferAgent("a", TransferConfig(listen=()), transports=[transport]) as agent:
        memory = np.arange(4 * MIB, dtype=np.uint32).view(np.uint8)[: 4 * MIB]
        yield agent, agent.register(memory), agent.register(region)


async def test_whole_objects_are_put_and_parts_are_got_first(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _Calls(monkeypatch)
    region = ObjectRegion("memory:///", 2 * MIB + 8192, prefix="/kv/", object_bytes=MIB, block_bytes=BLOCK)
    whole, last = head_bytes(MIB // BLOCK) + MIB, head_bytes(2) + 8192
    async with _play(region) as (agent, local, remote):
        half = np.arange(2) * (MIB // 2)  # two blocks that make up an object
        await agent.post(WRITE, local.ranges(half, MIB // 2), remote.ranges(half[::-1], MIB // 2)).wait()
        assert calls.seen == [f"put kv/00000000 {whole}"]
        calls.seen.clear()
        blocks = local.ranges([0, 9000, 30_000], 4096), remote.ranges([MIB, MIB + 8192, 2 * MIB], 4096)
        await agent.post(WRITE, *blocks).wait()
        assert sorted(calls.seen) == [
            f"get kv/00000001 {whole}",
            f"get kv/00000002 {last}",
            f"put kv/00000001 {head_bytes(2) + 2 * BLOCK}",
            f"put kv/00000002 {head_bytes(1) + BLOCK}",
        ]
        calls.seen.clear()
        await agent.post(READ, local.ranges(0, 100), remote.ranges(4090, 100)).wait()
        assert calls.seen == [f"get kv/00000000 {head_bytes(MIB // BLOCK)}", "get kv/00000000 8192"]
        calls.seen.clear()
        await agent.post(READ, local.ranges(0, MIB), remote.ranges(0, MIB)).wait()
        assert calls.seen == [f"get kv/00000000 {whole}"]


async def test_what_was_never_written_cannot_be_read() -> None:
    async with _play(ObjectRegion("memory:///", MIB, prefix="kv", block_bytes=BLOCK)) as (
        agent,
        local,
        remote,
    ):
        with pytest.raises(
            ChecksumMismatch, match=r"kv/00000000: the block of 4096 bytes at 4096 was never written"
        ):
            await agent.post(READ, local.ranges(0, 10), remote.ranges(4096, 10)).wait()
        await agent.post(WRITE, local.ranges(0, 10), remote.ranges(0, 10)).wait()
        with pytest.raises(ChecksumMismatch, match="never written"):
            await agent.post(READ, local.ranges(0, 10), remote.ranges(4096, 10)).wait()
        await agent.post(READ, local.ranges(0, 10), remote.ranges(4096, 10), checksum=False).wait()
        assert not local.region.owner[1][:10].any()


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (
            lambda raw: raw[:-5] + b"?" + raw[-4:],
            r"00000000: the block of 4096 bytes at 1044480 does not fit",
        ),
        (lambda raw: raw[:-4096], "00000000: the block of 4096 bytes at 1044480 is cut off"),
        (lambda raw: b"x" * len(raw), "00000000: no pack of version 1: it begins with 7878"),
        (lambda raw: raw[:60] + b"?" + raw[61:], "00000000: the head does not fit its checksum"),
        (lambda raw: b"", "00000000: a pack has at least 48 bytes, and not 0"),
    ],
)
async def test_an_object_that_somebody_changed_is_an_error(
    damage: Callable[[bytes], bytes], text: str
) -> None:
    store = obstore.store.MemoryStore()
    async with _play(ObjectRegion(store, MIB, object_bytes=MIB, block_bytes=BLOCK)) as (agent, local, remote):
        await agent.post(WRITE, local.ranges(0, MIB), remote.ranges()).wait()
        raw = bytes(obstore.get(store, "00000000").bytes())
        obstore.put(store, "00000000", damage(raw))
        for length in (MIB, 4096):
            with pytest.raises(ChecksumMismatch, match=text):
                await agent.post(READ, local.ranges(0, length), remote.ranges(MIB - length, length)).wait()
        with pytest.raises(ChecksumMismatch, match=text):
            await agent.post(WRITE, local.ranges(0, 10), remote.ranges(MIB - 10, 10)).wait()
        await agent.post(WRITE, local.ranges(0, MIB), remote.ranges()).wait()
        await agent.post(READ, local.ranges(0, MIB), remote.ranges()).wait()


async def test_another_size_of_objects_is_noticed() -> None:
    store = obstore.store.MemoryStore()
    async with _play(ObjectRegion(store, 2 * MIB, object_bytes=MIB)) as (agent, local, remote):
        await agent.post(WRITE, local.ranges(0, 2 * MIB), remote.ranges()).wait()
    async with _play(ObjectRegion(store, 2 * MIB, object_bytes=2 * MIB)) as (agent, local, remote):
        with pytest.raises(
            ChecksumMismatch,
            match=r"the pack is of namespace .* give the region the sizes that it was written with",
        ):
            await agent.post(READ, local.ranges(0, 2 * MIB), remote.ranges()).wait()


@pytest.mark.parametrize(
    ("url", "options", "text"),
    [
        ("ftp://host/x", {}, "Unable to recognise URL"),
        ("s3://bucket", {"regoin": "x"}, "'regoin' is not valid"),
        ("az://container", {}, "Account must be specified"),
    ],
)
async def test_a_store_that_cannot_be(
    url: str, options: dict[str, str], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    async with TransferAgent("a", TransferConfig(listen=())) as agent:
        with pytest.raises(TransferRefused, match=f"{url}.*{text}"):
            agent.register(ObjectRegion(url, MIB, options=options))


async def test_a_cancelled_write_is_seen_through_and_a_cancelled_read_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with _play(ObjectRegion("memory:///", MIB, object_bytes=MIB)) as (agent, local, remote):
        whole = local.ranges(0, MIB), remote.ranges()
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        asked = asyncio.Event()

        def never(*_: object, **__: object) -> asyncio.Future[None]:
            asked.set()
            return answer

        monkeypatch.setattr(obstore, "put_async", never)
        write = agent.post(WRITE, *whole)
        await asked.wait()
        write.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        assert write.is_pending
        answer.set_result(None)
        with pytest.raises(TransferError, match="cancelled"):
            await write.wait()

        answer, asked = asyncio.get_running_loop().create_future(), asyncio.Event()
        monkeypatch.setattr(obstore, "get_range_async", never)
        read = agent.post(READ, *whole)
        await asked.wait()
        read.cancel()
        with pytest.raises(TransferError, match="cancelled"):
            await read.wait()
        assert answer.cancelled()
