"""Writes blocks of a file region for ever, each filled with its number and write count: `slab_writer.py PATH`."""

import asyncio
import sys
from itertools import count

import numpy as np

from penstock.transfer import FileRegion, TransferAgent, TransferConfig, TransferOp

BLOCK_BYTES = 256 << 10
BLOCKS = 64


async def main(path: str) -> None:
    async with TransferAgent("writer", TransferConfig(listen=())) as agent:
        memory = np.zeros((BLOCKS, BLOCK_BYTES // 8), np.uint64)
        local = agent.register(memory)
        slab = agent.register(FileRegion(path, BLOCKS * BLOCK_BYTES, block_bytes=BLOCK_BYTES))
        order = np.arange(BLOCKS)
        random = np.random.default_rng(1)
        for turn in count(1):
            memory[:] = (turn << 16) + np.arange(BLOCKS, dtype=np.uint64)[:, None]
            random.shuffle(order)
            whole = local.blocks(order, BLOCK_BYTES), slab.blocks(order, BLOCK_BYTES)
            await agent.post(TransferOp.WRITE, *whole).wait()
            print(turn, flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
