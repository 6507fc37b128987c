"""KV events of a device and tiers that keep blocks of several groups of layers, as routers are told them."""

from collections.abc import Iterable

from msgspec.structs import replace

from penstock.core.types.events import (
    SHARED_HOLDER,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Holder,
    KvEvent,
    Tier,
)
from penstock.core.wire import hash_list
from penstock.kv.groups.groups import KvGroups
from penstock.kv.groups.reachable import ReachableBlocks
from penstock.kv.groups.told import ToldBlocks

_TIER_OF = {holder: tier for tier, holder in SHARED_HOLDER.items()}


class GroupEvents:
    """Turns events that name blocks of all groups into events of the prompts' blocks. Not thread-safe."""

    def __init__(self, groups: KvGroups, block_size: int) -> None:
        """Begin with nothing.

        Args:
            groups: of the model.
            block_size: tokens in a block.
        """
        self._groups = groups
        self._masks = [int(place.mask[0]) for place in groups.others]
        self._told = ToldBlocks(block_size, [place.needed for place in groups.others])
        self._holders: dict[Tier, Holder] = {}
        """Who keeps a tier's blocks, where it is not the worker alone."""

    def translate(self, events: Iterable[KvEvent]) -> list[KvEvent]:
        """Note events of all tiers, and return what routers are told."""
        if not self._masks:
            return list(events)
        out: list[KvEvent] = []
        for event in events:
            match event:
                case BlockStored():
                    self._store(event)
                case BlockRemoved():
                    self._remove(event)
                case AllBlocksCleared():
                    for tier in self._tiers_of(event.holder):
                        self._told.forget(tier)
                    out.append(event)
        return out + [self._held(event) for event in self._told.take()]

    def _held(self, event: KvEvent) -> KvEvent:
        """Note in an event who holds its blocks."""
        if isinstance(event, AllBlocksCleared) or event.tier not in self._holders:
            return event
        return replace(event, holder=self._holders[event.tier])

    def _tiers_of(self, holder: Holder) -> list[Tier]:
        if holder is not Holder.WORKER:
            return [_TIER_OF[holder]]
        return [tier for tier in Tier if tier not in self._holders]

    def _of(self, event: BlockStored | BlockRemoved) -> ReachableBlocks:
        if event.holder is not Holder.WORKER:
            self._holders[event.tier] = event.holder
        return self._told.of(event.tier)

    def _store(self, event: BlockStored) -> None:
        blocks = self._of(event)
        parent = event.parent_block_hash
        for each in hash_list(event.block_hashes):
            place = self._groups.place_of(each, parent)
            if place:
                blocks.store_other(place - 1, each ^ self._masks[place - 1])
            else:
                blocks.store(each, parent)
            parent = each

    def _remove(self, event: BlockRemoved) -> None:
        blocks = self._of(event)
        for each in hash_list(event.block_hashes):
            if not any(blocks.remove_other(group, each ^ mask) for group, mask in enumerate(self._masks)):
                blocks.remove(each)
