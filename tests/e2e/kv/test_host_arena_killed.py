"""Worker processes are killed, again and again, while they write the arena of their host; no wrong block is ever loaded."""

import asyncio
import os
import random
import signal
import sys
from pathlib import Path

import pytest
from arena_writer import BLOCK_BYTES, CHAIN_BLOCKS, PREFIXES, SLOTS

from penstock.core.wire import encode
from tests.support.shared_host import SharedHost
from tests.support.slots import chain

pytestmark = [pytest.mark.slow, pytest.mark.within(600)]

SCRIPT = Path(__file__).parents[1] / "helpers" / "arena_writer.py"
KILLS = 30


async def test_what_a_killed_worker_leaves_is_whole_or_missing_and_its_successor_adopts_it() -> None:
    """One worker lives and loads what two others write, of which one is killed at a time, at random points."""
    rng = random.Random(1)
    host = SharedHost(slots=SLOTS, block_bytes=BLOCK_BYTES, workers=3)
    living = host.worker(2)
    adopted, loaded = [], 0

    async def load() -> int:
        return await living.load(chain(CHAIN_BLOCKS, rng.randrange(PREFIXES)))

    writers = await asyncio.create_subprocess_exec(
        *(sys.executable, str(SCRIPT)),
        *(encode(host.part(number)).hex() for number in range(2)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert writers.stdin is not None
    assert writers.stdout is not None
    for turn in range(KILLS):
        writers.stdin.write(f"{turn % 2} {turn}\n".encode())
        pid = int(await writers.stdout.readline())
        had, served, corrupt = map(int, (await writers.stdout.readline()).split())
        assert corrupt == 0, "a killed worker leaves no record of a block that is not there"
        assert served >= had, "all blocks that it adopted, and those of the other extent"
        adopted.append(had)
        for _ in range(rng.randrange(1, 9)):
            assert await writers.stdout.readline() == b"offloaded\n"
            loaded += await load()
        for _ in range(rng.randrange(3)):  # the writer is now at any point of the next offloads
            loaded += await load()
        os.kill(pid, signal.SIGKILL)
        while (line := await writers.stdout.readline()) != b"ended\n":
            assert line == b"offloaded\n"
    writers.stdin.close()
    assert await writers.wait() == 0
    for number in range(PREFIXES):
        await living.load(chain(CHAIN_BLOCKS, number))
    assert living.tier.num_corrupt == 0
    living.tier.check()
    await living.tier.close()
    assert min(adopted[10:]) > SLOTS // 2, adopted
    assert loaded > KILLS * CHAIN_BLOCKS
