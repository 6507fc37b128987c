"""KV events of vLLM's engine core, over sockets in a private directory, since events contain the tokens of all prompts."""

import asyncio
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from penstock.core.errors import ConfigError
from penstock.core.log import get_logger
from penstock.core.types.events import AllBlocksCleared, KvEvent
from penstock.engine.kv_events.subscriber import KvEventSubscriber, PublisherAddress
from penstock.engine.kv_events.translator import HexSalts
from penstock.engine.spec import EngineSpec

_PARENT_BYTES_MAX = 60
"""A Unix socket's path has at most 107 bytes."""
_log = get_logger()


class VllmKvEvents:
    """Follows vLLM's events from `follow` to `close`. One event loop owns it."""

    def __init__(self, spec: EngineSpec, came: Callable[[int], None]) -> None:
        """Make it; `came` is called with the data-parallel rank of which there are events to take."""
        self._spec = spec
        self._came = came
        self._folder: str | None = None
        self._subscribers: list[KvEventSubscriber] = []
        self._following: list[asyncio.Task[None]] = []
        self._events: dict[int, list[KvEvent]] = {}

    def arguments(self) -> dict[str, Any]:
        """Make the directory, and give the arguments of AsyncEngineArgs that have vLLM publish there.

        Raises:
            ConfigError: the directory cannot be made.
        """
        from vllm.config import KVEventsConfig  # noqa: PLC0415 - an optional package

        if not self._spec.args.get("enable_prefix_caching", True):
            return {}
        parent = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
        if len(os.fsencode(parent)) > _PARENT_BYTES_MAX:
            parent = Path("/tmp")  # noqa: S108 - mkdtemp creates a private directory in it
        try:
            self._folder = tempfile.mkdtemp(prefix="vllm-events-", dir=parent)
        except OSError as error:
            raise ConfigError(
                f"{parent}: cannot make a private directory there: {(error.strerror or str(error)).lower()};"
                " set XDG_RUNTIME_DIR to a directory you can write"
            ) from error
        address = self._address(self._folder)
        return {
            "kv_events_config": KVEventsConfig(
                enable_kv_cache_events=True,
                publisher="zmq",
                endpoint=address.endpoint,
                replay_endpoint=address.replay_endpoint,
            )
        }

    def follow(self) -> None:
        """Begin to follow a vLLM that was started with `arguments`."""
        if self._folder is None:
            return
        for rank in range(self._spec.data_parallel):
            subscriber = KvEventSubscriber(
                self._address(self._folder).of_rank(rank),
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
        """Stop following, and remove the directory. Safe twice."""
        following, self._following = self._following, []
        for each in following:
            each.cancel()
        await asyncio.gather(*following, return_exceptions=True)
        folder, self._folder = self._folder, None
        if folder is not None:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

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

    def _address(self, folder: str) -> PublisherAddress:
        # vLLM appends the rank only to names with "inproc".
        return PublisherAddress(
            endpoint=f"ipc://{folder}/inproc.events", replay_endpoint=f"ipc://{folder}/inproc.replay"
        )
