"""Files as regions of an agent: what is kept and refused, and what several transfers do to one block."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.core.errors import ChecksumMismatch, ConfigError, TransferError, TransferRefused
from penstock.transfer import FileRegion, TransferAgent, TransferConfig, TransferOp
from penstock.transfer.storage import slots as slots_module
from penstock.transfer.storage.slots import SUFFIX

READ, WRITE = TransferOp.READ, TransferOp.WRITE
SIZE = 1 << 20


def _play() -> TransferAgent:
    return TransferAgent("a", TransferConfig(listen=()))


async def test_a_slab_is_kept_by_the_next_agent(tmp_path: Path) -> None:
    memory = np.random.default_rng(1).integers(0, 256, SIZE, np.uint8)
    async with _play() as agent:
        local, slab = agent.register(memory), agent.register(FileRegion(tmp_path / "kv", SIZE, name="kv"))
        handle = agent.post(WRITE, local.ranges(), slab.ranges())
        await handle.wait()
        assert handle.telemetry.backend == "file"
        assert agent.estimate(WRITE, SIZE, 1, remote=slab) > agent.estimate(WRITE, SIZE, 1, remote=local)
        again = agent.register(FileRegion(tmp_path / "kv", SIZE))
        for _ in range(2):
            with pytest.raises(TransferError, match=r"kv\.records is open in process"):
                await agent.post(READ, local.ranges(), again.ranges()).wait()
    async with _play() as agent:
        found = np.zeros(SIZE, np.uint8)
        local, slab = agent.register(found), agent.register(FileRegion(str(tmp_path / "kv"), SIZE))
        await agent.post(READ, local.ranges(), slab.ranges()).wait()
        assert np.array_equal(found, memory)
        await agent.deregister(slab)
        agent.register(FileRegion(tmp_path / "kv", SIZE))


async def _move(path: Path, memory: np.ndarray, op: TransferOp, *, block_bytes: int = 1 << 16) -> None:
    async with _play() as agent:
        local = agent.register(memory)
        stored = agent.register(FileRegion(path, memory.nbytes, block_bytes=block_bytes))
        await agent.post(op, local.ranges(), stored.ranges()).wait()


async def test_what_was_open_when_the_machine_went_down_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a power cut, data and checksum of a block may both be from before the last write."""
    memory = np.full(SIZE, 3, np.uint8)
    async with _play() as agent:
        local = agent.register(memory)
        stored = agent.register(FileRegion(tmp_path / "kv", SIZE, block_bytes=1 << 16))
        await agent.post(WRITE, local.ranges(), stored.ranges()).wait()
        for suffix in ("", SUFFIX):
            for copy in ("killed", "crashed"):
                shutil.copy(tmp_path / f"kv{suffix}", tmp_path / f"{copy}{suffix}")
    await _move(tmp_path / "killed", memory, READ)
    monkeypatch.setattr(slots_module, "_BOOT_ID", tmp_path / "another boot")
    await _move(tmp_path / "kv", memory, READ)
    with pytest.raises(ChecksumMismatch, match="never written, or not since the file was made or forgotten"):
        await _move(tmp_path / "crashed", memory, READ)
    assert "slot_file_forgotten" in capsys.readouterr().out


async def test_what_cannot_be_a_region_is_refused(tmp_path: Path) -> None:
    memory = np.zeros(SIZE, np.uint8)
    (tmp_path / "letter").write_bytes(b"dear")
    with pytest.raises(TransferError, match="letter exists without a record file beside it"):
        await _move(tmp_path / "letter", memory, READ)
    assert (tmp_path / "letter").read_bytes() == b"dear"
    await _move(tmp_path / "kv", memory, WRITE)
    with pytest.raises(TransferError, match="holds blocks of block_bytes 65536, and not 131072"):
        await _move(tmp_path / "kv", memory, READ, block_bytes=1 << 17)
    with pytest.raises(TransferError, match=r"missing/kv: opening failed: .*errno 2"):
        await _move(tmp_path / "missing" / "kv", memory, READ)
    with pytest.raises(ConfigError, match="size_bytes must be a multiple of block_bytes, which is 262144"):
        FileRegion(tmp_path / "kv", 4096)
    with pytest.raises(ConfigError, match="block_bytes must be a multiple of 4096, and not 0; got 100"):
        FileRegion(tmp_path / "kv", 4096, block_bytes=100)


async def test_a_bit_that_flips_is_an_error_until_the_block_is_written_again(tmp_path: Path) -> None:
    memory = np.full(SIZE, 3, np.uint8)
    await _move(tmp_path / "kv", memory, WRITE)
    with (tmp_path / "kv").open("r+b") as file:
        file.seek(70_000)
        file.write(b"?")
    with pytest.raises(ChecksumMismatch, match=r"65536 bytes at 65536 does not fit its checksum: the disk"):
        await _move(tmp_path / "kv", memory, READ)
    await _move(tmp_path / "kv", memory, WRITE)
    await _move(tmp_path / "kv", memory, READ)


async def test_a_peer_does_not_reach_a_file(tmp_path: Path) -> None:
    config = TransferConfig(listen=("memory",))
    async with TransferAgent("a", config) as agent, TransferAgent("b", config) as owner:
        owner.register(FileRegion(tmp_path / "kv", SIZE, name="kv"))
        local = agent.register(np.zeros(SIZE, np.uint8))
        peer = await agent.connect(owner.metadata())
        with pytest.raises(TransferRefused, match="files of agent b are reached by itself only"):
            agent.post(READ, local.ranges(), peer.region("kv").ranges(), peer)


async def test_parts_of_a_block_that_others_write_are_neither_lost_nor_mistaken_for_damage(
    tmp_path: Path,
) -> None:
    async with _play() as agent:
        memory = np.zeros(8192, np.uint8)
        local, slab = agent.register(memory), agent.register(FileRegion(tmp_path / "kv", SIZE))
        await agent.post(WRITE, local.ranges(0, 4096), slab.ranges(0, 4096)).wait()
        for turn in range(1, 6):
            memory[:3000] = turn
            handles: list[Any] = [
                agent.post(WRITE, local.ranges(part * 100, 100), slab.ranges(part * 100, 100))
                for part in range(30)
            ]
            handles += [
                agent.post(READ, local.ranges(4096 + part * 100, 100), slab.ranges(3000 + part * 100, 100))
                for part in range(10)
            ]
            for handle in handles:
                await handle.wait()
            await agent.post(READ, local.ranges(4096, 4096), slab.ranges(0, 4096)).wait()
            assert (memory[4096 : 4096 + 3000] == turn).all()
