"""Disks that hang, fail or are cut off under file regions: deadlines hold, others go on, and the process lives."""

import asyncio
import errno
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import ChecksumMismatch, DeadlineExceeded, MemoryInUse, TransferError
from penstock.transfer import Arena, FileRegion, TransferAgent, TransferConfig, TransferOp
from penstock.transfer.storage.file import FileStorage
from penstock.transfer.storage.slots import SUFFIX
from tests.support.sick_disk import SickDisk

READ, WRITE = TransferOp.READ, TransferOp.WRITE
SIZE = 1 << 20


@asynccontextmanager
async def hung(tmp_path: Path) -> AsyncIterator[tuple[TransferAgent, SickDisk, Any, Any, Any]]:
    """Give an agent with memory, a slab whose disk hangs, and one whose disk does not."""
    disk = SickDisk(hangs_s=60)
    config = TransferConfig(listen=(), heartbeat_timeout_s=0.2)
    transport = FileStorage(threads=2, disk=disk)
    with Arena.create(SIZE) as arena:
        try:
            async with TransferAgent("a", config, transports=[transport]) as agent:
                sick, well = (agent.register(FileRegion(tmp_path / name, SIZE)) for name in ("sick", "well"))
                local = agent.register(arena)
                for slab in (sick, well):
                    await agent.post(WRITE, local.ranges(), slab.ranges()).wait()
                disk.only = tmp_path / "sick"
                disk.be("hangs")
                yield agent, disk, local, sick, well
                disk.be("well")
        finally:
            disk.be("well")


@pytest.mark.parametrize("op", [READ, WRITE])
async def test_a_disk_that_hangs_keeps_no_deadline_waiting_and_nobody_else(
    op: TransferOp, tmp_path: Path
) -> None:
    async with hung(tmp_path) as (agent, disk, local, sick, well):
        stuck = [agent.post(op, local.ranges(), sick.ranges(), timeout_s=0.05) for _ in range(4)]
        await asyncio.to_thread(disk.hanging.acquire)
        for handle in stuck:
            with pytest.raises(DeadlineExceeded):
                await handle.wait()
        await agent.post(op, local.ranges(), well.ranges()).wait()


async def test_a_disk_that_hangs_while_a_slab_is_opened_stops_neither_the_loop_nor_other_files(
    tmp_path: Path,
) -> None:
    async with hung(tmp_path) as (agent, disk, local, _, well):
        disk.only = tmp_path / "new"
        new = agent.register(FileRegion(tmp_path / "new", SIZE))
        for op in (WRITE, READ):
            with pytest.raises(DeadlineExceeded):
                await agent.post(op, local.ranges(), new.ranges(), timeout_s=0.05).wait()
        await agent.post(WRITE, local.ranges(), well.ranges()).wait()
        await asyncio.to_thread(disk.hanging.acquire)
        disk.be("well")
        await agent.post(WRITE, local.ranges(), new.ranges()).wait()
        await agent.post(READ, local.ranges(), new.ranges()).wait()


@pytest.mark.slow
async def test_memory_that_a_hung_disk_may_still_write_is_in_quarantine(tmp_path: Path) -> None:
    async with hung(tmp_path) as (agent, disk, local, sick, _):
        handle = agent.post(READ, local.ranges(), sick.ranges(), timeout_s=0.05)
        with pytest.raises(DeadlineExceeded):
            await handle.wait()
        with pytest.raises(MemoryInUse, match="by what was cancelled"):
            await agent.deregister(local)
        with pytest.raises(MemoryInUse):
            await agent.deregister(sick)
        disk.be("well")
        for registration in (local, sick):
            async with asyncio.timeout(60):
                while registration in agent.quarantined:  # noqa: ASYNC110 - a thread ends
                    await asyncio.sleep(0.01)
            await agent.deregister(registration)


async def test_closing_does_not_wait_for_a_hung_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.transfer.storage.file._CLOSE_S", 0.25)
    async with hung(tmp_path) as (agent, _, local, sick, _):
        with pytest.raises(DeadlineExceeded):
            await agent.post(READ, local.ranges(), sick.ranges(), timeout_s=0.05).wait()
        turns = 0

        async def turn() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0.005)

        turning = asyncio.ensure_future(turn())
        await asyncio.sleep(0)
        with pytest.raises(MemoryInUse):
            await agent.close()
        turning.cancel()
        assert turns > 1, "the loop went on"


async def test_a_disk_without_space_is_an_error_of_every_transfer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        if length == SIZE:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("penstock.transfer.storage.slots.os.posix_fallocate", full)
    async with TransferAgent("a", TransferConfig(listen=())) as agent:
        slab, local = agent.register(FileRegion(tmp_path / "kv", SIZE)), agent.register(bytearray(SIZE))
        for op in (WRITE, READ):
            with pytest.raises(TransferError, match="no space for"):
                await agent.post(op, local.ranges(), slab.ranges()).wait()


async def test_records_that_are_cut_off_are_missing_blocks(tmp_path: Path) -> None:
    for kept in (SIZE, 0):
        async with TransferAgent("a", TransferConfig(listen=())) as agent:
            stored, local = agent.register(FileRegion(tmp_path / "kv", SIZE)), agent.register(bytearray(SIZE))
            ranges = local.ranges(), stored.ranges()
            if not kept:
                with pytest.raises(ChecksumMismatch, match="never written"):
                    await agent.post(READ, *ranges).wait()
            await agent.post(WRITE, *ranges).wait()
            await agent.post(READ, *ranges).wait()
        os.truncate(tmp_path / f"kv{SUFFIX}", 4096)


async def test_a_disk_that_fails_or_ends_early_is_named_with_its_error(tmp_path: Path) -> None:
    disk = SickDisk()
    async with TransferAgent(
        "a", TransferConfig(listen=()), transports=[FileStorage(threads=2, disk=disk)]
    ) as agent:
        stored, local = agent.register(FileRegion(tmp_path / "kv", SIZE)), agent.register(bytearray(SIZE))
        ranges = local.ranges(), stored.ranges()
        await agent.post(WRITE, *ranges).wait()
        disk.errors = {"pwritev": errno.ENOSPC}
        with pytest.raises(TransferError, match=r"kv: writing block \d failed: no space left .*errno 28"):
            await agent.post(WRITE, *ranges).wait()
        disk.errors = {"preadv": errno.EIO}
        with pytest.raises(TransferError, match=r"kv: reading block \d failed: input/output error"):
            await agent.post(READ, *ranges).wait()
        disk.errors.clear()
        os.truncate(tmp_path / "kv", 0)
        with pytest.raises(TransferError, match="was the file truncated"):
            await agent.post(READ, *ranges).wait()
