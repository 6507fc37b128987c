"""Disks that lie, fail and hang under slot files: never a wrong block, never a traceback, never a wait beyond the deadline."""

import asyncio
import errno
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from penstock.core.errors import DeadlineExceeded, PenstockError, TransferError
from penstock.kv.disk.slot_file import SlotFile
from penstock.testing.loop import run_async
from penstock.transfer.storage.slots import RECORD, SUFFIX, seal
from tests.support.sick_disk import SickDisk
from tests.support.slots import BLOCK_BYTES, NAMESPACE, chain, content, targets

SLOTS = 8
HASHES = chain(SLOTS)
BLOCKS = content(HASHES)


def make(path: Path, **options) -> SlotFile:
    return SlotFile(path, SLOTS * BLOCK_BYTES, BLOCK_BYTES, NAMESPACE, **options)


@pytest.fixture
def disk() -> Iterator[SickDisk]:
    sick = SickDisk(hangs_s=60)
    yield sick
    sick.be("well")


async def filled(path: Path, **options) -> SlotFile:
    slots = make(path, **options)
    assert await slots.store(HASHES, BLOCKS) == SLOTS
    return slots


@pytest.mark.parametrize("bit", [0, 7, 8 * BLOCK_BYTES - 1, 8 * 5 * BLOCK_BYTES + 4321])
async def test_a_flipped_bit_is_a_miss_and_the_block_is_stored_anew(tmp_path: Path, bit: int) -> None:
    bad = bit // 8 // BLOCK_BYTES
    slots = await filled(tmp_path / "kv")
    with (tmp_path / "kv").open("r+b") as file:
        file.seek(bit // 8)
        (byte,) = file.read(1)
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))
        os.fsync(file.fileno())
    into = targets(SLOTS)
    assert await slots.load(HASHES, into) == bad
    assert (into[:bad] == BLOCKS[:bad]).all()
    assert slots.counts.mismatched == 1
    assert slots.locate(HASHES) == bad
    assert await slots.store(HASHES, BLOCKS) == SLOTS
    assert await slots.load(HASHES, into) == SLOTS
    assert (into == BLOCKS).all()
    slots.check()
    await slots.close()


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.ENODEV, errno.EROFS])
async def test_errors_of_the_disk_are_worded_and_leave_the_index_sound(
    tmp_path: Path, disk: SickDisk, number: int
) -> None:
    slots = await filled(tmp_path / "kv", disk=disk)
    disk.errors = {"preadv": number, "pwritev": number}
    with pytest.raises(TransferError, match=rf"kv: .* failed: .*errno {number}"):
        await slots.load(HASHES, targets(SLOTS))
    other = chain(3, 7)
    with pytest.raises(TransferError, match=f"errno {number}"):
        await slots.store(other, content(other))
    disk.errors = {}
    slots.check()
    into = targets(SLOTS)
    found = slots.locate(HASHES)
    assert await slots.load(HASHES, into) == found
    assert (into[:found] == BLOCKS[:found]).all()
    assert await slots.store(other, content(other)) == 3
    slots.check()
    await slots.close()


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_disk_that_fails_while_it_is_opened_is_worded(tmp_path: Path, disk: SickDisk, number: int) -> None:
    disk.errors = {"preadv": number, "pwritev": number}
    with pytest.raises(TransferError, match=rf"opening failed: .*errno {number}"):
        make(tmp_path / "kv", disk=disk)
    run_async(make(tmp_path / "kv").close())


async def settled(slots: SlotFile) -> None:
    while slots._running:
        await asyncio.wait(slots._running)
    slots.check()


async def test_a_hung_disk_keeps_nobody_beyond_the_deadline_and_writes_no_memory_afterwards(
    tmp_path: Path, disk: SickDisk
) -> None:
    slots, well = await filled(tmp_path / "kv", disk=disk), await filled(tmp_path / "well")
    disk.be("hangs")
    into = targets(SLOTS)
    with pytest.raises(DeadlineExceeded, match="did not answer within"):
        await slots.load(HASHES[:4], into, timeout_s=0.05)
    other = chain(3, 7)
    with pytest.raises(DeadlineExceeded):
        await slots.store(other, content(other), timeout_s=0.05)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(slots.load(HASHES[:4], into))
        await asyncio.to_thread(disk.hanging.acquire)
        task.cancel()
    again = targets(SLOTS)
    assert await well.load(HASHES, again) == SLOTS, "another disk has threads of its own"
    assert (again == BLOCKS).all()
    disk.be("well")
    found = slots.locate(HASHES)
    assert await slots.load(HASHES, again) == found > 0
    assert not into.any(), "whoever gave up gets nothing"
    assert (again[:found] == BLOCKS[:found]).all()
    await settled(slots)
    await slots.close()
    await well.close()


@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "copied"])
async def test_sources_that_change_after_a_deadline_are_never_published(
    tmp_path: Path, disk: SickDisk, offset: int
) -> None:
    memory = np.zeros(BLOCK_BYTES + 8192, np.uint8)
    first = -memory.ctypes.data % 4096 + offset
    source = memory[first : first + BLOCK_BYTES]
    slots = SlotFile(tmp_path / "kv", BLOCK_BYTES, BLOCK_BYTES, NAMESPACE, disk=disk)
    await slots.store(chain(1, 7), content(chain(1, 7)))  # its record is cleared first, which hangs
    source[:] = BLOCKS[0]
    disk.be("hangs")
    with pytest.raises(DeadlineExceeded):
        await slots.store(HASHES[:1], [source], timeout_s=0.05)
    source[:] = 0
    disk.be("well")
    await settled(slots)
    assert slots.locate(HASHES) == 0
    assert await slots.store(HASHES[:1], BLOCKS[:1]) == 1
    into = targets(1)
    assert await slots.load(HASHES[:1], into) == 1
    assert (into == BLOCKS[:1]).all()
    await slots.close()


async def test_closing_does_not_wait_for_a_hung_disk(
    tmp_path: Path, disk: SickDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.kv.disk.slot_file._CLOSE_S", 0.05)
    slots = await filled(tmp_path / "kv", disk=disk)
    disk.be("hangs")
    with pytest.raises(DeadlineExceeded):
        await slots.load(HASHES, targets(SLOTS), timeout_s=0.05)
    await slots.close()
    disk.be("well")
    again = None
    while again is None:
        try:
            again = make(tmp_path / "kv")
        except TransferError:  # the hung thread still has it
            await asyncio.sleep(0.01)
    assert await again.load(HASHES, targets(SLOTS)) == SLOTS
    await again.close()


async def test_a_probe_keeps_nothing_and_spares_what_is_kept(tmp_path: Path) -> None:
    slots = make(tmp_path / "kv")
    speed = slots.probe()
    assert speed is not None
    assert speed > 0
    assert slots.num_cached == 0
    assert await slots.store(HASHES[:5], BLOCKS[:5]) == 5
    await slots.close()
    slots = make(tmp_path / "kv")
    assert slots.probe()
    into = targets(SLOTS)
    assert await slots.load(HASHES, into) == 5
    assert (into[:5] == BLOCKS[:5]).all()
    assert await slots.store(HASHES, BLOCKS) == SLOTS
    await slots.close()
    slots = make(tmp_path / "kv")
    assert slots.probe()
    assert await slots.load(HASHES, into) == SLOTS
    assert (into == BLOCKS).all()
    slots.check()
    await slots.close()


@pytest.mark.parametrize("fault", ["fails", "hangs"])
async def test_a_probe_of_a_disk_that_fails_or_hangs_ends_soon_and_nobody_gets_slots_that_hang(
    tmp_path: Path, disk: SickDisk, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr("penstock.kv.disk.probe._TIMEOUT_S", 0.05)
    slots = make(tmp_path / "kv", disk=disk, threads=1)
    disk.be(fault)
    assert slots.probe() is None
    disk.mode = "well"  # what hangs goes on to hang
    expected = 0 if fault == "hangs" else SLOTS
    assert await slots.store(HASHES, BLOCKS) == expected, "a late write may still come"
    disk.be("well")
    await slots.close()


def mutate(data: bytearray, rng: random.Random) -> None:
    """Damage records as disks, file systems and people do."""
    for _ in range(rng.randint(1, 4)):
        at, size = rng.randrange(len(data)), rng.choice([1, 4, 64, 512, 4096])
        first, second = (4096 + rng.randrange(SLOTS) * RECORD.itemsize for _ in range(2))
        match rng.randrange(7):
            case 0:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at : at + size] = rng.randbytes(len(data[at : at + size]))
            case 2:
                data[at : at + size] = bytes(len(data[at : at + size]))
            case 3:  # a record in another's place
                data[first : first + RECORD.itemsize] = data[second : second + RECORD.itemsize]
            case 4:
                del data[at:]
                data.extend(b"\0")
            case 5:
                data.extend(rng.randbytes(size))
            case 6:  # a field of a record
                field = rng.choice(list(RECORD.fields))
                width, offset = RECORD.fields[field][0].itemsize, RECORD.fields[field][1]
                data[first + offset : first + offset + width] = rng.randbytes(width)
                # by a program, which sealed it
                if rng.random() < 0.5 and len(data) >= first + RECORD.itemsize:
                    record = np.frombuffer(data[first : first + RECORD.itemsize], RECORD).copy()
                    seal(record)
                    data[first : first + RECORD.itemsize] = record.tobytes()


@pytest.mark.slow
@pytest.mark.within(600)
@pytest.mark.parametrize("files", [1_000, pytest.param(10_000, marks=pytest.mark.nightly)])
async def test_mutated_record_files_give_no_traceback_and_no_wrong_block(tmp_path: Path, files: int) -> None:
    path, rng = tmp_path / "kv", random.Random(1)
    other = chain(3, 7)
    others, into = content(other), targets(SLOTS)

    async def make_first() -> bytes:
        slots = make(path)
        await slots.store(HASHES[:5], BLOCKS[:5])
        await slots.store(other, others)
        await slots.close()
        return read_records()

    def read_records() -> bytes:
        return Path(f"{path}{SUFFIX}").read_bytes()

    def damage() -> None:
        data = bytearray(good)
        mutate(data, rng)
        Path(f"{path}{SUFFIX}").write_bytes(data)
        if path.stat().st_size != SLOTS * BLOCK_BYTES:
            shutil.copy(saved, path)

    async def try_one(index: int) -> tuple[int, bool]:
        try:
            slots = make(path, threads=1)
        except PenstockError:
            return 0, True
        count = 0
        for hashes, blocks in ((HASHES, BLOCKS), (other, others)):
            n = 0
            while n < len(hashes):
                loaded = await slots.load(hashes[n:], into)
                assert (into[:loaded] == blocks[n : n + loaded]).all(), f"file {index}"
                count += loaded
                n += loaded + 1  # the one after them is missing
        slots.check()
        await slots.close()
        return count, False

    good = await make_first()
    saved = shutil.copy(path, tmp_path / "saved")
    results = []
    for index in range(files):
        damage()
        results.append(await try_one(index))
    counts = np.array([count for count, _ in results])
    assert 0 < sum(refused for _, refused in results) < files / 2, "most files still open"
    assert (counts == 0).any()
    assert (counts == counts.max()).any(), "and undamaged blocks are served"
