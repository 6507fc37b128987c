"""A process whose agent is idle between two reads: `python transfer_idle.py CONFIG_JSON METADATA_HEX SIZE_BYTES`.

It prints `idle` after the first read of the other agent's memory. For a line on stdin it reads again over the same link, and
prints `connected`, or `lost` where the link was lost meanwhile.
"""

import asyncio
import sys

import numpy as np

from penstock.transfer import PeerLost, TransferAgent, TransferConfig, TransferOp


async def main(config: str, metadata: str, size_bytes: str) -> None:
    async with TransferAgent("reader", TransferConfig.model_validate_json(config)) as agent:
        here = agent.register(np.zeros(int(size_bytes), np.uint8))
        peer = await agent.connect(bytes.fromhex(metadata))
        ranges = here.ranges(), peer.region("shared").ranges()
        await agent.post(TransferOp.READ, *ranges, peer).wait()  # what a transfer opens stays open
        print("idle", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        try:
            await agent.post(TransferOp.READ, *ranges, peer).wait()
            print("connected", flush=True)
        except PeerLost:
            print("lost", flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
