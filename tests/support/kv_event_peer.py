"""A process that publishes KV events, or follows them: `python -m tests.support.kv_event_peer publish|follow ENDPOINT`.

`publish` stores a block twice a second; `follow` prints the kind of each event.
"""

import asyncio
import sys
from collections.abc import Sequence
from itertools import count

from penstock.core.types.events import KvEvent
from penstock.engine.kv_events.subscriber import KvEventSubscriber, PublisherAddress
from penstock.engine.kv_events.translator import HexSalts
from tests.support.kv_publisher import publishing

_BLOCK_SIZE = 2


async def publish(address: PublisherAddress) -> None:
    async with publishing(address) as publisher:
        for number in count(1):
            stored = {
                "type": "BlockStored", "block_hashes": [number], "parent_block_hash": None,
                "token_ids": [number] * _BLOCK_SIZE, "block_size": _BLOCK_SIZE, "medium": "GPU",
            }  # fmt: skip
            await publisher.send(stored)
            await asyncio.sleep(0.5)


async def follow(address: PublisherAddress) -> None:
    def tell(events: Sequence[KvEvent]) -> None:
        for event in events:
            print(type(event).__name__, flush=True)

    await KvEventSubscriber(address, block_size=_BLOCK_SIZE, salt_of=HexSalts(), publish=tell).run()


if __name__ == "__main__":
    does = {"publish": publish, "follow": follow}[sys.argv[1]]
    asyncio.run(does(PublisherAddress(endpoint=sys.argv[2])))
