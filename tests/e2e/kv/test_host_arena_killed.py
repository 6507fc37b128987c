"""Worker processes are killed, again and again, while they write the arena of their host; no wrong block is ever loaded."""

import multiprocessing
import random
import time
from multiprocessing.connection import Connection

import pytest

from penstock.kv.host.memory import HostPart
from penstock.testing.loop import run_async
from tests.support.shared_host import HostWorker, SharedHost
from tests.support.slots import chain

pytestmark = pytest.mark.slow

SLOTS, BLOCK_BYTES, CHAIN_BLOCKS, PREFIXES, KILLS = 48, 65_536, 6, 24, 60


def write(part: HostPart, seed: int, told: Connection) -> None:
    """Adopt the extent, tell how many blocks it had, check all of them, and offload prefixes until killed."""

    async def main() -> None:
        worker = HostWorker(part, SLOTS, BLOCK_BYTES)
        adopted = worker.tier.num_cached
        served = 0
        for number in range(PREFIXES):
            hashes = chain(CHAIN_BLOCKS, number)
            for n in range(CHAIN_BLOCKS):
                served += await worker.load(hashes[n : n + 1])
        told.send((adopted, served, worker.tier.num_corrupt))
        rng = random.Random(seed)
        while True:
            await worker.offload(chain(CHAIN_BLOCKS, rng.randrange(PREFIXES)))
            await worker.load(chain(CHAIN_BLOCKS, rng.randrange(PREFIXES)))

    run_async(main(), timeout_s=60)


def test_what_a_killed_worker_leaves_is_whole_or_missing_and_its_successor_adopts_it() -> None:
    """One worker lives and loads what the others write, which are killed at random points."""
    rng = random.Random(1)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.shared_host", "penstock.testing.loop"])
    host = SharedHost(slots=SLOTS, block_bytes=BLOCK_BYTES, workers=3)
    adopted: list[int] = []
    loaded = 0

    async def main() -> None:
        nonlocal loaded
        living = host.worker(2)
        for turn in range(KILLS):
            number = turn % 2
            ours, theirs = context.Pipe()
            process = context.Process(target=write, args=(host.part(number), turn, theirs))
            process.start()
            theirs.close()
            while not ours.poll():
                loaded += await living.load(chain(CHAIN_BLOCKS, rng.randrange(PREFIXES)))
            try:
                had, served, corrupt = ours.recv()
            except EOFError:
                pytest.fail(f"writer {turn} ended: a wrong block, or an error")
            end_s = time.monotonic() + rng.random() * 0.03
            while time.monotonic() < end_s:
                loaded += await living.load(chain(CHAIN_BLOCKS, rng.randrange(PREFIXES)))
            assert process.is_alive()
            process.kill()
            process.join()
            assert corrupt == 0, "a killed worker leaves no record of a block that is not there"
            assert served >= had, "all blocks that it adopted, and those of the other extent"
            adopted.append(had)
        for number in range(PREFIXES):
            await living.load(chain(CHAIN_BLOCKS, number))
        assert living.tier.num_corrupt == 0
        living.tier.check()
        await living.tier.close()

    run_async(main(), timeout_s=120)
    assert min(adopted[10:]) >= SLOTS - 3 * CHAIN_BLOCKS, adopted
    assert loaded > 100 * CHAIN_BLOCKS
