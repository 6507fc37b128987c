"""What tiers tell the worker with vLLM's statistics: their counts, and which blocks they keep."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from penstock.core.types.events import SHARED_HOLDER, KvEvent, Tier
from penstock.core.types.instances import KvHolder
from penstock.core.types.load import KvTierCounts
from penstock.engine.vllm.tiers.settings import CONNECTOR

_COUNTS = msgspec.msgpack.Decoder(tuple[KvTierCounts, ...])
_HOLDERS = msgspec.msgpack.Decoder(tuple[KvHolder, ...])
_EVENTS = msgspec.msgpack.Decoder(list[KvEvent])


def pack_stats(
    counts: Sequence[KvTierCounts], events: Sequence[KvEvent], holders: Sequence[KvHolder] = ()
) -> dict[str, Any]:
    """Make the data of vLLM's `KVConnectorStats`."""
    return {
        "tiers": msgspec.msgpack.encode(counts),
        "holders": msgspec.msgpack.encode(holders),
        "events": [msgspec.msgpack.encode(events)],
    }


class TierStats:
    """The tiers of one data-parallel rank."""

    def __init__(self) -> None:
        self.counts: tuple[KvTierCounts, ...] = ()
        """What each tier keeps and has done; empty without tiers."""
        self.holders: tuple[KvHolder, ...] = ()
        """Whose blocks they load that other workers load from too."""

    def read(self, reported: Mapping[str, Any] | None) -> Sequence[KvEvent]:
        """Note a report, and return its KV events.

        Args:
            reported: `SchedulerStats.kv_connector_stats`: the connector's own data, or those by a MultiConnector's children.
        """
        own = (reported or {}).get(CONNECTOR, reported) or {}
        if "tiers" not in own:
            return ()
        self.counts = _COUNTS.decode(own["tiers"])
        self.holders = _HOLDERS.decode(own["holders"])
        return [event for packed in own["events"] for event in _EVENTS.decode(packed)]

    @property
    def own_blocks(self) -> int:
        """Blocks that tiers can keep which no other worker loads from."""
        kinds = {holder.kind for holder in self.holders}
        return sum(each.total_blocks for each in self.counts if SHARED_HOLDER.get(each.tier) not in kinds)

    @property
    def hit_tokens(self) -> tuple[int, ...]:
        """Prompt tokens found in each lower `Tier`, host first; empty without tiers."""
        by_tier = {each.tier: each.hit_tokens for each in self.counts}
        return tuple(by_tier.get(tier, 0) for tier in tuple(Tier)[1:]) if by_tier else ()
