"""Two processes with NIXL transfers: `nixl_pair.py` starts `nixl_pair.py owner` and prints its results as JSON."""

import asyncio
import json
import os
import signal
import subprocess
import sys

import numpy as np

from penstock.transfer import TransferAgent, TransferConfig, TransferError, TransferOp
from penstock.transfer.transports.nixl.transport import NixlTransport

SIZE_BYTES = 128 << 20
BLOCK_BYTES = 64 << 10
CONFIG = TransferConfig(
    listen=("unix",), heartbeat_timeout_s=3600
)  # so that the end is not detected by a timeout


async def own() -> None:
    async with TransferAgent("owner", CONFIG, transports=[NixlTransport()]) as agent:
        agent.register(np.zeros(SIZE_BYTES, np.uint8), "kv")
        print(agent.metadata().hex(), flush=True)
        await asyncio.sleep(600)


def main() -> dict[str, object]:
    with subprocess.Popen([sys.executable, __file__, "owner"], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout
        try:
            metadata = bytes.fromhex(owner.stdout.readline())
            return asyncio.run(read(metadata, owner.pid))
        finally:
            owner.kill()


async def read(metadata: bytes, owner_pid: int) -> dict[str, object]:
    async with TransferAgent("reader", CONFIG, transports=[NixlTransport()]) as agent:
        return await run_scenario(agent, metadata, owner_pid)


async def run_scenario(agent: TransferAgent, metadata: bytes, owner_pid: int) -> dict[str, object]:
    random = np.random.default_rng(0)
    sent = random.integers(0, 256, SIZE_BYTES, np.uint8)
    local = agent.register(sent)
    back = np.zeros_like(sent)
    target = agent.register(back)
    peer = await agent.connect(metadata)
    remote = peer.region("kv")
    order = random.permutation(SIZE_BYTES // BLOCK_BYTES)
    there = remote.blocks(order, BLOCK_BYTES)
    blocks = np.arange(len(order))
    await agent.post(TransferOp.WRITE, local.blocks(blocks, BLOCK_BYTES), there, peer, checksum=True).wait()
    await agent.post(TransferOp.READ, target.blocks(blocks, BLOCK_BYTES), there, peer, checksum=True).wait()
    is_equal = bool(np.array_equal(sent, back))
    handles = [agent.post(TransferOp.WRITE, local.ranges(), remote.ranges(), peer) for _ in range(50)]
    await asyncio.sleep(0.005)
    os.kill(owner_pid, signal.SIGKILL)
    errors = set()
    for handle in handles:
        try:
            await handle.wait()
        except TransferError as error:
            errors.add(type(error).__name__)
    return {
        "is_equal": is_equal,
        "errors": sorted(errors),
        "under_way": agent.transfers_under_way,
    }


if __name__ == "__main__":
    if sys.argv[1:] == ["owner"]:
        asyncio.run(own())
    else:
        print(json.dumps(main()))
