"""Files as regions of an agent: what is refused, and what several transfers do to one block."""

import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.core.errors import ConfigError, TransferError, TransferRefused
from penstock.testing.loop import run_async
from penstock.transfer import FileRegion, TransferAgent, TransferConfig, TransferOp

READ, WRITE = TransferOp.READ, TransferOp.WRITE
SIZE = 1 << 20


def _play(scenario: Callable[[TransferAgent], Awaitable[None]]) -> None:
    async def main() -> None:
        async with TransferAgent("a", TransferConfig(listen=())) as agent:
            await scenario(agent)

    run_async(main())


@pytest.mark.parametrize("size", [0, -4096, 4095, 5000])
def test_a_size_that_is_no_multiple_of_a_block(size: int) -> None:
    with pytest.raises(ConfigError, match=f"size_bytes must be a multiple of 4096, and not 0; got {size}"):
        FileRegion("kv", size)


def test_a_slab_is_kept_by_the_next_agent(tmp_path: Path) -> None:
    memory = np.random.default_rng(1).integers(0, 256, SIZE, np.uint8)

    async def write(agent: TransferAgent) -> None:
        local, slab = agent.register(memory), agent.register(FileRegion(tmp_path / "kv", SIZE, name="kv"))
        handle = agent.post(WRITE, local.ranges(), slab.ranges())
        await handle.wait()
        assert handle.telemetry.backend == "file"
        assert agent.estimate(WRITE, SIZE, 1, remote=slab) > agent.estimate(WRITE, SIZE, 1, remote=local)
        again = agent.register(FileRegion(tmp_path / "kv", SIZE))
        for _ in range(2):
            with pytest.raises(TransferError, match="kv is open in another agent or process"):
                await agent.post(READ, local.ranges(), again.ranges()).wait()

    async def read(agent: TransferAgent) -> None:
        found = np.zeros(SIZE, np.uint8)
        local, slab = agent.register(found), agent.register(FileRegion(str(tmp_path / "kv"), SIZE))
        await agent.post(READ, local.ranges(), slab.ranges()).wait()
        assert np.array_equal(found, memory)
        await agent.deregister(slab)
        agent.register(FileRegion(tmp_path / "kv", SIZE))

    _play(write)
    _play(read)


def test_from_file_to_file_is_refused_with_the_reason(tmp_path: Path) -> None:
    async def scenario(agent: TransferAgent) -> None:
        one = agent.register(FileRegion(tmp_path / "one", SIZE))
        two = agent.register(FileRegion(tmp_path / "two", SIZE))
        with pytest.raises(
            TransferRefused, match="between files and main memory, and the local side is file"
        ):
            agent.post(READ, one.ranges(), two.ranges())

    _play(scenario)


def test_a_peer_does_not_reach_a_file(tmp_path: Path) -> None:
    async def main() -> None:
        config = TransferConfig(listen=("memory",))
        async with TransferAgent("a", config) as agent, TransferAgent("b", config) as owner:
            owner.register(FileRegion(tmp_path / "kv", SIZE, name="kv"))
            local = agent.register(np.zeros(SIZE, np.uint8))
            peer = await agent.connect(owner.metadata())
            with pytest.raises(TransferRefused, match="files of agent b are reached by itself only"):
                agent.post(READ, local.ranges(), peer.region("kv").ranges(), peer)

    run_async(main())


def test_one_list_may_name_several_files(tmp_path: Path) -> None:
    async def scenario(agent: TransferAgent) -> None:
        memory = np.arange(SIZE, dtype=np.uint32).view(np.uint8)[:SIZE].copy()
        local = agent.register(memory)
        slabs = [agent.register(FileRegion(tmp_path / str(i), SIZE)) for i in range(2)]
        both = type(local.ranges()).joined([slab.ranges(0, SIZE // 2) for slab in slabs])
        wanted = memory.copy()
        await agent.post(WRITE, local.ranges([0, SIZE // 2], SIZE // 2), both).wait()
        memory[:] = 0
        await agent.post(READ, local.ranges([0, SIZE // 2], SIZE // 2), both).wait()
        assert np.array_equal(memory, wanted)

    _play(scenario)


def test_parts_of_a_block_that_others_write_are_neither_lost_nor_mistaken_for_damage(tmp_path: Path) -> None:
    async def scenario(agent: TransferAgent) -> None:
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

    _play(scenario)


def test_a_disk_that_fails_ends_the_transfer(tmp_path: Path) -> None:
    async def scenario(agent: TransferAgent) -> None:
        local = agent.register(np.zeros(SIZE, np.uint8))
        slab = agent.register(FileRegion(tmp_path / "kv", SIZE))
        await agent.post(WRITE, local.ranges(), slab.ranges()).wait()
        os.truncate(tmp_path / "kv", 0)
        with pytest.raises(TransferError, match=r"kv: reading .* bytes at .* failed"):
            await agent.post(READ, local.ranges(), slab.ranges()).wait()

    _play(scenario)
