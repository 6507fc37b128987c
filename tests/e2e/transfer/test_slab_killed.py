"""A process is killed in the middle of writing a file region; the next one finds whole blocks or errors."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from slab_writer import BLOCK_BYTES, BLOCKS

from penstock.core.errors import ChecksumMismatch
from penstock.testing.loop import run_async
from penstock.transfer import FileRegion, TransferAgent, TransferConfig, TransferOp

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("turns", [4, *(pytest.param(turns, marks=pytest.mark.nightly) for turns in (1, 9))])
def test_what_a_killed_process_wrote_is_whole_or_refused(tmp_path: Path, turns: int) -> None:
    script = Path(__file__).parents[1] / "helpers" / "slab_writer.py"
    with subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "kv")], stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        for _ in range(turns):
            assert writer.stdout.readline()
        writer.kill()

    async def main() -> None:
        async with TransferAgent("reader", TransferConfig(listen=())) as agent:
            memory = np.zeros(BLOCK_BYTES // 8, np.uint64)
            local, slab = (
                agent.register(memory),
                agent.register(FileRegion(tmp_path / "kv", BLOCKS * BLOCK_BYTES, block_bytes=BLOCK_BYTES)),
            )
            torn = 0
            for block in range(BLOCKS):
                try:
                    await agent.post(
                        TransferOp.READ, local.ranges(), slab.blocks([block], BLOCK_BYTES)
                    ).wait()
                except ChecksumMismatch:
                    torn += 1
                    continue
                assert (memory == memory[0]).all(), "a mixture"
                assert (memory & 0xFFFF == block).all(), "another block"
                assert (memory >> 16 >= turns).all(), "an old one, that a write had replaced"
            assert torn <= 8, "no more than were being written, on 8 threads"

    run_async(main())
