"""Stores blocks in a slot file for ever, evicting old ones: `slot_writer.py PATH SLOTS BLOCK_BYTES`. Prints what it has stored."""

import asyncio
import sys
from itertools import count
from pathlib import Path

from penstock.kv.slot_file import SlotFile

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.support.slots import NAMESPACE, chain, content

CHAIN_BLOCKS = 4


async def main(path: str, slots: int, block_bytes: int) -> None:
    file = SlotFile(path, slots * block_bytes, block_bytes, NAMESPACE, threads=4)
    for turn in count():
        hashes = chain(CHAIN_BLOCKS, turn % 64)
        await file.store(hashes, content(hashes, block_bytes))
        if turn > 2:
            print(turn, flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
