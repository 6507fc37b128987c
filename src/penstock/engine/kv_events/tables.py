"""Groups of layers with tables of blocks of their own, in an engine's KV events: which of the first group's blocks still count.

An engine names the blocks of all groups at one place of a prompt alike.
"""

from collections.abc import Callable, Iterable, Mapping

from penstock.core.types.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent, Tier
from penstock.core.wire import hash_list
from penstock.engine.kv_events.engine_events import EngineHash, EngineRemoved, EngineStored
from penstock.kv.groups import ToldBlocks

NameOf = Callable[[EngineHash], int | None]
"""Gives the low half of Penstock's hash of a block that an engine has told with its tokens."""


class OtherTables:
    """Blocks of all groups but the first, and what is told of the first group's. One task owns it."""

    def __init__(self, block_size: int, held: Mapping[Tier, Iterable[tuple[int, int | None]]]) -> None:
        """Begin with blocks of the first group that were told: low halves of hashes, and their parents' by tier."""
        self._told = ToldBlocks(block_size)
        for tier, blocks in held.items():
            for key, parent in blocks:
                self._told.of(tier).store(key, parent)
        self._told.take()
        self._groups: dict[int, int] = {}
        """By the engine's number: its number here."""
        self._copies: dict[tuple[Tier, int], dict[EngineHash, int]] = {}
        self._names: dict[EngineHash, int] = {}
        """Of blocks that some group here has."""
        self._unnamed: dict[EngineHash, set[tuple[Tier, int]]] = {}
        """Blocks that were stored before the first group's."""

    def __len__(self) -> int:
        """Number of blocks, by tier and group."""
        return sum(map(len, self._copies.values()))

    def apply(self, event: EngineStored | EngineRemoved, name_of: NameOf) -> None:
        """Note an event of another group."""
        assert event.group is not None, "of the first group"
        if isinstance(event, EngineStored) and event.group not in self._groups:
            self._groups[event.group] = len(self._groups)
            self._told.add_group(event.needed_blocks)
        group = self._groups.get(event.group)
        if group is None:
            return
        place = (event.tier, group)
        copies = self._copies.setdefault(place, {})
        for each in event.hashes:
            count = copies.get(each, 0)
            if isinstance(event, EngineStored):
                copies[each] = count + 1
                if not count:
                    self._store(place, each, name_of(each))
            elif count > 1:
                copies[each] = count - 1
            elif count:
                del copies[each]
                self._remove(place, each)

    def named(self, block_hash: EngineHash, key: int) -> None:
        """Note that the first group has told a block."""
        for place in self._unnamed.pop(block_hash, ()):
            self._store(place, block_hash, key)

    def translate(self, events: Iterable[KvEvent]) -> list[KvEvent]:
        """Note events of the first group, and return what routers are told of all since the last call."""
        for event in events:
            match event:
                case BlockStored():
                    parent = event.parent_block_hash
                    for each in hash_list(event.block_hashes):
                        self._told.of(event.tier).store(each, parent)
                        parent = each
                case BlockRemoved():
                    for each in hash_list(event.block_hashes):
                        self._told.of(event.tier).remove(each)
                case AllBlocksCleared():
                    raise AssertionError("tables begin after it")
        return self._told.take()

    def _store(self, place: tuple[Tier, int], block_hash: EngineHash, key: int | None) -> None:
        if key is None:
            self._unnamed.setdefault(block_hash, set()).add(place)
            return
        self._names[block_hash] = key
        self._told.of(place[0]).store_other(place[1], key)

    def _remove(self, place: tuple[Tier, int], block_hash: EngineHash) -> None:
        if (unnamed := self._unnamed.get(block_hash)) is not None:
            unnamed.discard(place)
            if not unnamed:
                del self._unnamed[block_hash]
            return
        self._told.of(place[0]).remove_other(place[1], self._names[block_hash])
        if not any(block_hash in copies for copies in self._copies.values()):
            del self._names[block_hash]
