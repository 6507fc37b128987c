"""KV events of vLLM's engine core, which come with the messages of its steps."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from penstock.core.errors import ConfigError
from penstock.core.types.events import AllBlocksCleared, Holder, KvEvent
from penstock.engine.kv_events.subscriber import EventReader
from penstock.engine.kv_events.translator import HexSalts
from penstock.engine.spec import EngineSpec

KV_EVENTS = "PenstockKvEvents"
"""Their key in `SchedulerStats.kv_connector_stats`."""


def events_arguments(spec: EngineSpec) -> dict[str, Any]:
    """Give the arguments of AsyncEngineArgs that have vLLM note its events, without a publisher of its own.

    Raises:
        ConfigError: the graph sets another scheduler than Penstock's, which tells them.
    """
    if not spec.args.get("enable_prefix_caching", True):
        return {}
    if "scheduler_cls" in spec.args:
        raise ConfigError(
            "engine_args: scheduler_cls: Penstock's own scheduler tells the KV events; leave it out, or set"
            " enable_prefix_caching: false"
        )
    return {"kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"}}


class VllmKvEvents:
    """Events of all data-parallel ranks that no `Step` has told yet. One event loop owns it."""

    def __init__(self, spec: EngineSpec) -> None:
        self.readers = [
            EventReader("vLLM", block_size=spec.block_size, salt_of=HexSalts(), hash_key=spec.hash_key)
            for _ in range(spec.data_parallel)
        ]
        """By rank."""
        self.holders: frozenset[Holder] = frozenset()
        """Shared holders that the worker is registered with: one rank tells of them. Blocks of others are told as the worker's."""
        self._events: dict[int, list[KvEvent]] = {}

    def read(self, rank: int, reported: Mapping[str, Any] | None) -> None:
        """Read the events of a rank's step.

        Args:
            rank: data-parallel rank.
            reported: `SchedulerStats.kv_connector_stats`.
        """
        for payload in (reported or {}).get(KV_EVENTS, ()):
            for events in self.readers[rank].read(payload):
                self.add(rank, events)

    def add(self, rank: int, events: Sequence[KvEvent]) -> None:
        """Add events of a data-parallel rank, such as those of tiers."""
        if events:
            self._events.setdefault(rank, []).extend(events)

    def take(self) -> Sequence[tuple[int, Sequence[KvEvent]]]:
        """Give the events since the last call, in order: (data-parallel rank, its events)."""
        if not self._events:
            return ()
        events, self._events = self._events, {}
        return tuple((rank, self._told(rank, each)) for rank, each in events.items())

    def _told(self, rank: int, events: Sequence[KvEvent]) -> Sequence[KvEvent]:
        if all(event.holder is Holder.WORKER for event in events):
            return events
        told: list[KvEvent] = []
        for event in events:
            if event.holder is Holder.WORKER or (event.holder in self.holders and not rank):
                told.append(event)
            elif event.holder not in self.holders and not isinstance(event, AllBlocksCleared):
                told.append(msgspec.structs.replace(event, holder=Holder.WORKER))
        return told
