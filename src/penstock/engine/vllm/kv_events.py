"""KV events of vLLM's engine core, over sockets in a private directory, since events contain the tokens of all prompts."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from penstock.core.log import get_logger
from penstock.core.types.events import AllBlocksCleared, KvEvent
from penstock.engine.kv_events.subscriber import KvEventSubscriber, PublisherAddress
from penstock.engine.kv_events.translator import HexSalts
from penstock.engine.launch_host import LaunchHost
from penstock.engine.spec import EngineSpec

_log = get_logger()


def events_address(spec: EngineSpec, host: LaunchHost) -> PublisherAddress | None:
    """Choose where vLLM publishes its KV events; None: it has no prefix cache.

    Raises:
        ConfigError: no private directory can be made for the sockets.
    """
    if not spec.args.get("enable_prefix_caching", True):
        return None
    folder = host.directory("vllm-events-")
    # vLLM appends the rank only to names with "inproc".
    return PublisherAddress(
        endpoint=f"ipc://{folder}/inproc.events", replay_endpoint=f"ipc://{folder}/inproc.replay"
    )


def events_arguments(address: PublisherAddress | None) -> dict[str, Any]:
    """Give the arguments of AsyncEngineArgs that have vLLM publish there."""
    if address is None:
        return {}
    config = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": address.endpoint,
        "replay_endpoint": address.replay_endpoint,
    }
    return {"kv_events_config": config}


class VllmKvEvents:
    """Follows vLLM's events from `follow` to `close`. One event loop owns it."""

    def __init__(self, spec: EngineSpec, came: Callable[[int], None]) -> None:
        """Make it; `came` is called with the data-parallel rank of which there are events to take."""
        self._spec = spec
        self._came = came
        self._subscribers: list[KvEventSubscriber] = []
        self._following: list[asyncio.Task[None]] = []
        self._events: dict[int, list[KvEvent]] = {}

    def follow(self, address: PublisherAddress | None) -> None:
        """Begin to follow a vLLM that publishes at `address`; None: it publishes nothing."""
        if address is None:
            return
        for rank in range(self._spec.data_parallel):
            subscriber = KvEventSubscriber(
                address.of_rank(rank),
                block_size=self._spec.block_size,
                salt_of=HexSalts(),
                publish=partial(self._publish, rank),
                hash_key=self._spec.hash_key,
            )
            following = asyncio.get_running_loop().create_task(subscriber.run())
            following.add_done_callback(partial(self._ended, rank))
            self._subscribers.append(subscriber)
            self._following.append(following)

    def num_blocks(self, rank: int) -> int:
        """Count the blocks that a data-parallel rank is known to hold."""
        return self._subscribers[rank].num_blocks

    def take(self) -> Sequence[tuple[int, Sequence[KvEvent]]]:
        """Give the events since the last call, in order: (data-parallel rank, its events)."""
        if not self._events:
            return ()
        events, self._events = self._events, {}
        return tuple(events.items())

    def add(self, rank: int, events: Sequence[KvEvent]) -> None:
        """Add events of a data-parallel rank, such as those of tiers, which vLLM does not tell."""
        if events:
            self._events.setdefault(rank, []).extend(events)

    async def close(self) -> None:
        """Stop following. Safe twice."""
        following, self._following = self._following, []
        for each in following:
            each.cancel()
        await asyncio.gather(*following, return_exceptions=True)

    def _ended(self, rank: int, following: asyncio.Task[None]) -> None:
        """Log that events cannot be followed, and clear the rank's blocks; requests go on."""
        if not following.cancelled() and (error := following.exception()) is not None:
            _log.error(
                "kv_events_ended", exc_info=error, effect="routers know nothing of this worker's prefix cache"
            )
            self._publish(rank, [AllBlocksCleared()])

    def _publish(self, rank: int, events: Sequence[KvEvent]) -> None:
        self.add(rank, events)
        self._came(rank)
