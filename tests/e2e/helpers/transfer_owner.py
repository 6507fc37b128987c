"""A process with one agent that others use: `python transfer_owner.py CONFIG_JSON SIZE_BYTES`.

It prints its metadata and stays until it is killed.
"""

import asyncio
import sys

from penstock.transfer import Arena, TransferAgent, TransferConfig


async def main(config: str, size_bytes: str) -> None:
    with Arena.create(int(size_bytes)) as arena:
        async with TransferAgent("owner", TransferConfig.model_validate_json(config)) as agent:
            agent.register(arena, "shared")
            print(agent.metadata().hex(), flush=True)
            await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
