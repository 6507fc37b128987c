"""The index of packs in memory: which packs have a block. It is built from the heads of listed packs."""

from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np

from penstock.core.types.events import BlockRemoved, BlockStored, KvEvent, Tier
from penstock.core.wire import HashArray, pack_hashes
from penstock.kv.pool.prefixes import block_keys
from penstock.transfer.storage.packs import BLOCKS_MAX, Pack

_EVENT_BLOCKS_MAX = 1 << 14
"""Blocks in the events of one `take_events`, so that a large store does not hold a step up."""

_HEAP_SLACK = 64


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a block is.

    Attributes:
        name: of its pack.
        offset: in bytes, where it begins in the pack.
        data_sum: CRC-32C that its bytes must have.
    """

    name: str
    offset: int
    data_sum: int


class PackIndex:
    """The known packs of one namespace and their blocks. Not thread-safe; one task owns it.

    A block may be in several packs. It is held while at least one known pack has an undamaged copy.
    A block takes some 250 bytes.
    """

    def __init__(self, block_size: int, blocks_max: int) -> None:
        """Begin without packs.

        Args:
            block_size: tokens in a block.
            blocks_max: blocks to know at most; beyond it the oldest packs are forgotten.
        """
        self._block_size = block_size
        self._blocks_max = blocks_max
        self._packs: dict[str, tuple[Pack, int, float]] = {}  # with its number and date
        self._by_number: dict[int, Pack] = {}
        self._by_date: list[tuple[float, int]] = []
        """A heap of dates and numbers, the oldest first; those of packs that went away are skipped."""
        self._next_number = 0
        self._places: dict[bytes, int | tuple[int, ...]] = {}  # pack number * BLOCKS_MAX + row
        self._damaged: set[str] = set()
        self._changed: dict[bytes, bool] = {}  # whether a block was held at the last events

    def __len__(self) -> int:
        """Blocks that are held."""
        return len(self._places)

    def __contains__(self, name: str) -> bool:
        """Whether a pack is known."""
        return name in self._packs

    @property
    def names(self) -> set[str]:
        """Names of the known packs."""
        return set(self._packs)

    @property
    def has_events(self) -> bool:
        """Whether `take_events` may return any."""
        return bool(self._changed)

    def is_damaged(self, name: str) -> bool:
        """Whether a block of this pack had other bytes than were written."""
        return name in self._damaged

    def locate(self, block_hashes: HashArray) -> int:
        """Count the leading blocks that are held."""
        count = 0
        for key in block_keys(block_hashes):
            if key not in self._places:
                break
            count += 1
        return count

    def find(self, block_hashes: HashArray) -> list[Entry]:
        """Find the leading blocks that are held, in the order of `block_hashes`.

        A block that is in several packs is taken from the pack of the block before it, so that one request loads many blocks.
        """
        found: list[Entry] = []
        before = -1
        for key in block_keys(block_hashes):
            places = self._places_of(key)
            if not places:
                break
            place = next((each for each in places if each // BLOCKS_MAX == before), places[0])
            before, row = divmod(place, BLOCKS_MAX)
            pack = self._by_number[before]
            found.append(Entry(pack.name, int(pack.offsets[row]), int(pack.records["data_sum"][row])))
        return found

    def newest(self, count: int) -> HashArray:
        """Give the hashes of up to `count` held blocks, of the packs that were added last: (n, 2) uint64, empty without any."""
        found = [np.zeros((0, 2), np.uint64)]
        for pack, _, _ in reversed(self._packs.values()):
            hashes = pack.hashes[: count - sum(map(len, found))]
            found.append(hashes[: self.locate(hashes)])
            if sum(map(len, found)) >= count:
                break
        return np.concatenate(found)

    def add(self, pack: Pack, modified_s: float) -> None:
        """Add a pack whose head was verified; one that is known is replaced, and counts as undamaged.

        Args:
            pack: the pack.
            modified_s: its date.
        """
        self.remove([pack.name])
        number = self._next_number
        self._next_number += 1
        self._packs[pack.name] = (pack, number, modified_s)
        self._by_number[number] = pack
        heappush(self._by_date, (modified_s, number))
        if len(self._by_date) > 2 * len(self._packs) + _HEAP_SLACK:
            self._by_date = [(date_s, number) for _, number, date_s in self._packs.values()]
            heapify(self._by_date)
        for row, key in enumerate(block_keys(pack.hashes)):
            self._changed.setdefault(key, key in self._places)
            place = number * BLOCKS_MAX + row
            self._places[key] = (*self._places_of(key), place) if key in self._places else place
        while len(self._places) > self._blocks_max and len(self._packs) > 1:
            oldest = self._by_number.get(heappop(self._by_date)[1])
            if oldest is not None:
                self.remove([oldest.name])

    def remove(self, names: Iterable[str]) -> None:
        """Forget packs that went away; unknown names are ignored."""
        for name in names:
            self._damaged.discard(name)
            if name in self._packs:
                pack, number, _ = self._packs.pop(name)
                for key in block_keys(pack.hashes):
                    self._forget(key, number)
                del self._by_number[number]

    def drop(self, block_hash: bytes, name: str) -> None:
        """Forget a damaged copy of a block in a pack; the pack's other blocks stay."""
        if name in self._packs:
            self._damaged.add(name)
            self._forget(block_hash, self._packs[name][1])

    def clear(self) -> None:
        """Forget all packs, and events that were not taken."""
        self.remove(tuple(self._packs))
        self._changed.clear()

    def take_events(self) -> tuple[KvEvent, ...]:
        """Return what is held now and was not before, and the reverse; the rest at the next call if it is much."""
        changed = self._changed
        if len(changed) > _EVENT_BLOCKS_MAX:
            keys = list(changed)
            self._changed = {key: changed[key] for key in keys[_EVENT_BLOCKS_MAX:]}
            changed = {key: changed[key] for key in keys[:_EVENT_BLOCKS_MAX]}
        else:
            self._changed = {}
        gone = [key for key, was_held in changed.items() if was_held and key not in self._places]
        new = {key: None for key, was_held in changed.items() if not was_held and key in self._places}
        events: list[KvEvent] = []
        if gone:
            lows = np.frombuffer(b"".join(gone), "<u8")[::2]
            events.append(BlockRemoved(block_hashes=pack_hashes(lows), tier=Tier.OBJECT))
        while new:
            place = self._places_of(next(iter(new)))[0]
            events.append(self._take_run(self._by_number[place // BLOCKS_MAX], place % BLOCKS_MAX, new))
        return tuple(events)

    def check(self) -> None:
        """Raise AssertionError if blocks and packs differ."""
        assert self._damaged <= self._packs.keys(), "a damaged pack that is not known"
        assert {number for _, number, _ in self._packs.values()} == self._by_number.keys(), "packs by number"
        dates = {number: date_s for _, number, date_s in self._packs.values()}
        assert dates.items() <= {number: date_s for date_s, number in self._by_date}.items(), (
            "a pack without its date"
        )
        listed: set[tuple[bytes, str]] = set()
        for key in self._places:
            places = self._places_of(key)
            assert places, "a block without a place"
            listed |= {(key, self._by_number[place // BLOCKS_MAX].name) for place in places}
            assert len(set(places)) == len(places), "a place twice"
        every = {(key, name) for name, (pack, _, _) in self._packs.items() for key in block_keys(pack.hashes)}
        assert listed <= every, "a block in a pack that does not have it"
        missing = {name for _, name in every - listed}
        assert missing <= self._damaged, "a sound pack with a block that is not found"

    def _places_of(self, key: bytes) -> tuple[int, ...]:
        places = self._places.get(key, ())
        return places if isinstance(places, tuple) else (places,)

    def _forget(self, key: bytes, number: int) -> None:
        before = self._places_of(key)
        places = tuple(place for place in before if place // BLOCKS_MAX != number)
        if places == before:
            return
        self._changed.setdefault(key, True)
        if places:
            self._places[key] = places if len(places) > 1 else places[0]
        else:
            del self._places[key]

    def _take_run(self, pack: Pack, row: int, new: dict[bytes, None]) -> BlockStored:
        """Make the event of the blocks from a row of a pack on that are each the child of the one before; takes them from `new`."""
        hashes, parents = pack.hashes, pack.records["parent"]
        keys = block_keys(hashes)
        end = row
        while end < len(keys) and keys[end] in new and (end == row or parents[end] == hashes[end - 1, 0]):
            del new[keys[end]]
            end += 1
        return BlockStored(
            block_hashes=pack_hashes(np.ascontiguousarray(hashes[row:end, 0])),
            parent_block_hash=int(parents[row]) or None,
            block_size=self._block_size,
            tier=Tier.OBJECT,
        )
