"""Files as regions of an agent: what is refused, and what several transfers do to one block."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.core.errors import TransferError, TransferRefused
from penstock.transfer import FileRegion, TransferAgent, TransferConfig, TransferOp

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
            with pytest.raises(TransferError, match="kv is open in another agent or process"):
                await agent.post(READ, local.ranges(), again.ranges()).wait()
    async with _play() as agent:
        found = np.zeros(SIZE, np.uint8)
        local, slab = agent.register(found), agent.register(FileRegion(str(tmp_path / "kv"), SIZE))
        await agent.post(READ, local.ranges(), slab.ranges()).wait()
        assert np.array_equal(found, memory)
        await agent.deregister(slab)
        agent.register(FileRegion(tmp_path / "kv", SIZE))


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
