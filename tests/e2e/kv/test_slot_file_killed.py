"""A process is killed, again and again, while it stores blocks in a slot file; no block is ever torn."""

import random
import subprocess
import sys
from pathlib import Path

import pytest
from slot_writer import CHAIN_BLOCKS

from penstock.core.errors import TransferRefused
from penstock.kv.slot_file import SlotFile
from penstock.testing.loop import run_async
from tests.support.slots import NAMESPACE, chain, content, targets

pytestmark = pytest.mark.slow

SLOTS, BLOCK_BYTES = 40, 262_144
SCRIPT = Path(__file__).parents[1] / "helpers" / "slot_writer.py"


def start_writer(path: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), str(path), str(SLOTS), str(BLOCK_BYTES)],
        stdout=subprocess.PIPE,
        text=True,
    )


def test_what_a_killed_process_leaves_is_whole_or_missing(tmp_path: Path) -> None:
    rng = random.Random(1)
    path = tmp_path / "kv"

    async def check() -> int:
        slots = SlotFile(path, SLOTS * BLOCK_BYTES, BLOCK_BYTES, NAMESPACE)
        served = 0
        for turn in range(64):
            hashes = chain(CHAIN_BLOCKS, turn)
            for n in range(CHAIN_BLOCKS):
                into = targets(1, BLOCK_BYTES)
                loaded = await slots.load(hashes[n : n + 1], into)
                assert (into[:loaded] == content(hashes[n : n + loaded], BLOCK_BYTES)).all(), "a wrong block"
                served += loaded
        assert slots.counts.mismatched == 0, "a killed process leaves no record of a block that is not there"
        slots.check()
        await slots.close()
        return served

    served = []
    for _ in range(6):
        with start_writer(path) as writer:
            assert writer.stdout is not None
            for _ in range(rng.randrange(4, 9)):
                assert writer.stdout.readline()
            writer.kill()  # at any point of the next blocks
        served.append(run_async(check()))
    assert min(served) > SLOTS // 2, f"{served} of {SLOTS} blocks"


def test_a_slot_file_of_another_process_is_refused_with_its_pid(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    with start_writer(path) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline()
        with pytest.raises(TransferRefused, match=f"open in process {writer.pid} on "):
            SlotFile(path, SLOTS * BLOCK_BYTES, BLOCK_BYTES, NAMESPACE)
        writer.kill()
