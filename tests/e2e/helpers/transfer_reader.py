"""A process that transfers to and from another one's memory: `python transfer_reader.py CONFIG_JSON METADATA_HEX OP SIZE_BYTES`.

It checks one transfer and prints `moving`. It repeats the transfer until an error, and prints the error. Then
it reconnects, transfers once more and prints `moved again`.
"""

import asyncio
import sys

import numpy as np

from penstock.transfer import PeerLost, TransferAgent, TransferConfig, TransferError, TransferOp


def _say(*words: object) -> None:
    print(*words, sep="\t", flush=True)


async def main(config: str, metadata: str, op_name: str, size: str) -> None:
    op, size_bytes = TransferOp(op_name), int(size)
    async with TransferAgent("reader", TransferConfig.model_validate_json(config)) as agent:
        data = np.random.default_rng(1).integers(0, 256, size_bytes, np.uint8)
        mine = data.copy()
        here = agent.register(mine)

        async def connected():
            peer = await agent.connect(bytes.fromhex(metadata))
            return agent.prepare(here.ranges(), peer.region("shared").ranges(), peer)

        prepared = await connected()
        await prepared.post(TransferOp.WRITE).wait()
        mine[:] = 0
        handle = prepared.post(TransferOp.READ)
        await handle.wait()
        assert np.array_equal(mine, data), "other bytes came back"
        _say("moving", handle.telemetry.backend)
        try:
            while True:
                await prepared.post(op).wait()
        except PeerLost as error:
            _say("lost", error.message, agent.transfers_under_way)
        while True:
            try:
                prepared = await connected()
                break
            except TransferError:
                await asyncio.sleep(0.05)
        mine[:] = data
        await prepared.post(TransferOp.WRITE).wait()
        mine[:] = 0
        await prepared.post(TransferOp.READ).wait()
        assert np.array_equal(mine, data), "other bytes came back"
        _say("moved again")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
