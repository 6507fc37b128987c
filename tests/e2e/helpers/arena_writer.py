"""Forks a writer of a host's arena for each line `NUMBER SEED` on stdin; a writer goes on until it is killed.

The arguments are the encoded parts of the arena, in hexadecimal, by number.
"""

import os
import random
import sys
from pathlib import Path

import msgspec

from penstock.kv.host_arena import HostPart
from penstock.testing.loop import run_async

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.support.shared_host import HostWorker
from tests.support.slots import chain

SLOTS, BLOCK_BYTES, CHAIN_BLOCKS, PREFIXES = 48, 65_536, 6, 24


async def write(part: HostPart, seed: int) -> None:
    """Adopt the extent, load every block once and tell how many there were, then offload prefixes and tell each."""
    worker = HostWorker(part, SLOTS, BLOCK_BYTES)
    adopted, served = worker.tier.num_cached, 0
    for number in range(PREFIXES):
        hashes = chain(CHAIN_BLOCKS, number)
        for n in range(CHAIN_BLOCKS):
            served += await worker.load(hashes[n : n + 1])
    print(adopted, served, worker.tier.num_corrupt, flush=True)
    rng = random.Random(seed)
    while True:
        await worker.offload(chain(CHAIN_BLOCKS, rng.randrange(PREFIXES)))
        os.write(1, b"offloaded\n")  # whole, also if it is killed now
        await worker.load(chain(CHAIN_BLOCKS, rng.randrange(PREFIXES)))


if __name__ == "__main__":
    parts = [msgspec.msgpack.decode(bytes.fromhex(part), type=HostPart) for part in sys.argv[1:]]
    for line in sys.stdin:
        number, seed = map(int, line.split())
        pid = os.fork()
        if pid == 0:
            run_async(write(parts[number], seed), timeout_s=600)
        print(pid, flush=True)
        os.waitpid(pid, 0)
        print("ended", flush=True)
