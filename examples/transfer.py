"""Two processes exchange blocks: this one reads some of its child's and writes one, which the child is told of."""

import asyncio
import sys

import numpy as np

from penstock.transfer import Arena, TransferAgent, TransferOp

SIZE = 256 << 10


async def owner() -> None:
    with Arena.create(64 * SIZE) as arena:
        blocks = arena.array.reshape(64, SIZE)
        blocks[:] = np.arange(64, dtype=np.uint8)[:, None]
        async with TransferAgent("owner") as agent:
            agent.register(arena, "kv")
            print(agent.metadata().hex(), flush=True)  # whoever has it has access
            peer, text = await anext(agent.notifications())
            print(f"{peer} says {text.decode()}: block 3 is full of {blocks[3, 0]}", file=sys.stderr)


async def reader() -> None:
    child = await asyncio.create_subprocess_exec(sys.executable, __file__, "owner", stdout=-1)
    async with TransferAgent("reader") as agent:
        peer = await agent.connect(bytes.fromhex((await child.stdout.readline()).decode()))
        mine = np.zeros((4, SIZE), np.uint8)
        here, there = agent.register(mine), peer.region("kv")
        blocks = here.blocks([0, 1, 2], SIZE), there.blocks([7, 50, 21], SIZE)
        read = agent.post(TransferOp.READ, *blocks, peer)
        await read.wait()
        print(f"read blocks full of {mine[:3, 0]} by {read.telemetry.backend}")
        mine[3] = 99
        block = here.blocks([3], SIZE), there.blocks([3], SIZE)
        await agent.post(TransferOp.WRITE, *block, peer, notify=b"written").wait()
        await child.wait()


asyncio.run(owner() if sys.argv[1:] == ["owner"] else reader())
