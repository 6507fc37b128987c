"""What tiers tell the worker with vLLM's statistics: their counts, and which blocks they keep."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from penstock.core.types.events import KvEvent, Tier
from penstock.core.types.load import KvTierCounts
from penstock.engine.vllm.tiers.settings import CONNECTOR

_COUNTS = msgspec.msgpack.Decoder(tuple[KvTierCounts, ...])
_EVENTS = msgspec.msgpack.Decoder(list[KvEvent])


def pack_stats(counts: Sequence[KvTierCounts], events: Sequence[KvEvent]) -> dict[str, Any]:
    """Make the data of vLLM's `KVConnectorStats`."""
    return {"tiers": msgspec.msgpack.encode(counts), "events": [msgspec.msgpack.encode(events)]}


class TierStats:
    """The tiers of one data-parallel rank."""

    def __init__(self) -> None:
        self.counts: tuple[KvTierCounts, ...] = ()
        """What each tier keeps and has done; empty without tiers."""

    def read(self, reported: Mapping[str, Any] | None) -> Sequence[KvEvent]:
        """Note a report, and return its KV events.

        Args:
            reported: `SchedulerStats.kv_connector_stats`: the connector's own data, or those by a MultiConnector's children.
        """
        own = (reported or {}).get(CONNECTOR, reported) or {}
        if "tiers" not in own:
            return ()
        self.counts = _COUNTS.decode(own["tiers"])
        return [event for packed in own["events"] for event in _EVENTS.decode(packed)]

    @property
    def hit_tokens(self) -> tuple[int, ...]:
        """Prompt tokens found in each lower `Tier`, host first; empty without tiers."""
        by_tier = {each.tier: each.hit_tokens for each in self.counts}
        return tuple(by_tier.get(tier, 0) for tier in tuple(Tier)[1:]) if by_tier else ()
