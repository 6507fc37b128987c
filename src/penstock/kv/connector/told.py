"""KV events of tiers that keep blocks of several groups of layers, as routers are told them."""

from collections.abc import Iterable

from penstock.core.types.events import SHARED_HOLDER, AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from penstock.core.wire import hash_list
from penstock.kv.groups.groups import KvGroups
from penstock.kv.groups.told import ToldBlocks

_TIER_OF = {holder: tier for tier, holder in SHARED_HOLDER.items()}


class TierEvents:
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
                    self._told.forget(_TIER_OF[event.holder])
                    out.append(event)
        return out + self._told.take()

    def _store(self, event: BlockStored) -> None:
        blocks = self._told.of(event.tier)
        parent = event.parent_block_hash
        for each in hash_list(event.block_hashes):
            place = self._groups.place_of(each, parent)
            if place:
                blocks.store_other(place - 1, each ^ self._masks[place - 1])
            else:
                blocks.store(each, parent)
            parent = each

    def _remove(self, event: BlockRemoved) -> None:
        blocks = self._told.of(event.tier)
        for each in hash_list(event.block_hashes):
            if not any(blocks.remove_other(group, each ^ mask) for group, mask in enumerate(self._masks)):
                blocks.remove(each)
