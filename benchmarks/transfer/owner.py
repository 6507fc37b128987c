"""The other process of `python -m benchmarks transfer`: it owns memory and does nothing.

    python -m benchmarks.transfer.owner TRANSPORT LISTEN MEMORY

It prints its metadata in hex; for each line of seconds on stdin the process prints the share of a core that it used during these seconds.
"""

import asyncio
import sys
import time

import uvloop

from benchmarks.transfer.shapes import config_for, make_pool
from penstock.transfer import TransferAgent


async def serve(transport: str, listen: str, memory: str) -> None:
    async with TransferAgent("owner", config_for(transport, listen)) as agent:
        agent.register(make_pool(memory), "pool")
        print(agent.metadata().hex(), flush=True)
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            began_s, cpu_s = time.perf_counter(), time.process_time()
            await asyncio.sleep(float(line))
            share = (time.process_time() - cpu_s) / (time.perf_counter() - began_s)
            print(share, flush=True)


if __name__ == "__main__":
    uvloop.run(serve(*sys.argv[1:4]))
