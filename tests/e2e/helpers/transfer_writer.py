"""A process that fills another agent's region with one byte repeatedly until the owner ends.

`python transfer_writer.py CONFIG_JSON METADATA_HEX`. It prints a line at its first write and one at the end,
and keeps running.
"""

import asyncio
import sys

import numpy as np

from penstock.core.errors import PenstockError
from penstock.transfer import Arena, TransferAgent, TransferConfig, TransferOp


async def main(config: str, metadata: str) -> None:
    async with TransferAgent("writer", TransferConfig.model_validate_json(config)) as agent:
        peer = await agent.connect(bytes.fromhex(metadata))
        there = peer.region("kv")
        with Arena.create(there.size_bytes) as arena:
            arena.array[:] = np.uint8(9)
            here = agent.register(arena)
            prepared = agent.prepare(here.ranges(), there.ranges(), peer)
            await prepared.post(TransferOp.WRITE).wait()
            print("writing", flush=True)
            try:
                while True:
                    await prepared.post(TransferOp.WRITE).wait()
            except PenstockError as error:
                print(error.message, flush=True)
            await asyncio.sleep(60)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
