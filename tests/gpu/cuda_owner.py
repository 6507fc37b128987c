"""The other process of a test: it owns device memory and does nothing."""

import asyncio

import torch

from penstock.transfer import TransferAgent, TransferConfig
from penstock.transfer.transports.cuda.transport import CudaTransport


async def own() -> None:
    config = TransferConfig(listen=("unix",))
    async with TransferAgent("owner", config, transports=[CudaTransport()]) as agent:
        memory = torch.zeros(8 << 20, dtype=torch.uint8, device="cuda:0")
        torch.cuda.synchronize()
        agent.register(memory[1 << 20 :], "kv")  # not where the allocation begins
        print(agent.metadata().hex(), flush=True)
        await asyncio.sleep(600)


if __name__ == "__main__":
    asyncio.run(own())
