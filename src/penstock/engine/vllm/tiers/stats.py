"""What tiers tell the worker with vLLM's statistics: their counts, and which blocks they keep."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from penstock.core.types.events import KvEvent, Tier
from penstock.core.types.load import KvTierCounts
from penstock.engine.vllm.tiers.settings import CONNECTOR

_COUNTS = msgspec.msgpack.Decoder(tuple[KvTierCounts, ...])
_EVENTS = msgspec.msgpack.Decoder(list[KvEvent])
_SAME = frozenset({"tier", "block_bytes", "is_off"})
"""Fields that ranks do not add up."""


def pack_stats(counts: Sequence[KvTierCounts], events: Sequence[KvEvent]) -> dict[str, Any]:
    """Make the data of vLLM's `KVConnectorStats`."""
    return {"tiers": msgspec.msgpack.encode(counts), "events": [msgspec.msgpack.encode(events)]}


class TierStats:
    """The tiers of all data-parallel ranks."""

    def __init__(self) -> None:
        self._by_rank: dict[int, tuple[KvTierCounts, ...]] = {}

    def read(self, reported: Mapping[str, Any] | None, rank: int) -> list[KvEvent]:
        """Note a rank's report, and return its KV events.

        Args:
            reported: `SchedulerStats.kv_connector_stats`: the connector's own data, or those by a MultiConnector's children.
            rank: the data-parallel rank.
        """
        own = (reported or {}).get(CONNECTOR, reported) or {}
        if "tiers" not in own:
            return []
        self._by_rank[rank] = _COUNTS.decode(own["tiers"])
        return [event for packed in own["events"] for event in _EVENTS.decode(packed)]

    @property
    def counts(self) -> tuple[KvTierCounts, ...]:
        """What each tier keeps and has done, in all ranks."""
        ranks = tuple(counts for counts in self._by_rank.values() if counts)  # () before its tiers are made
        if len(ranks) <= 1:
            return ranks[0] if ranks else ()
        return tuple(_sum(same) for same in zip(*ranks, strict=True))

    @property
    def hit_tokens(self) -> tuple[int, ...]:
        """Prompt tokens found in each lower `Tier`, host first; empty without tiers."""
        by_tier = {each.tier: each.hit_tokens for each in self.counts}
        return tuple(by_tier.get(tier, 0) for tier in tuple(Tier)[1:]) if by_tier else ()


def _sum(ranks: Sequence[KvTierCounts]) -> KvTierCounts:
    names = [name for name in KvTierCounts.__struct_fields__ if name not in _SAME]
    total = {name: sum(getattr(each, name) for each in ranks) for name in names}
    return msgspec.structs.replace(ranks[0], is_off=any(each.is_off for each in ranks), **total)
