"""The index of packs in memory: which packs have a block. It is built from the heads of listed packs."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from penstock.core.wire import HashArray
from penstock.kv.object.pack import Pack


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
    """

    def __init__(self) -> None:
        """Begin without packs."""
        self._packs: dict[str, Pack] = {}
        self._places: dict[bytes, list[Entry]] = {}
        self._damaged: set[str] = set()

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

    def is_damaged(self, name: str) -> bool:
        """Whether a block of this pack had other bytes than were written."""
        return name in self._damaged

    def locate(self, block_hashes: HashArray) -> int:
        """Count the leading blocks that are held."""
        keys = np.ascontiguousarray(block_hashes, "<u8")
        count = 0
        for row in keys:
            if row.tobytes() not in self._places:
                break
            count += 1
        return count

    def find(self, block_hashes: HashArray) -> list[Entry]:
        """Find the leading blocks that are held, in the order of `block_hashes`.

        A block that is in several packs is taken from the pack of the block before it, so that one request loads many blocks.
        """
        found: list[Entry] = []
        for row in np.ascontiguousarray(block_hashes, "<u8"):
            places = self._places.get(row.tobytes())
            if places is None:
                break
            before = found[-1].name if found else ""
            found.append(next((entry for entry in places if entry.name == before), places[0]))
        return found

    def add(self, pack: Pack) -> None:
        """Add a pack with a verified head. It replaces a known pack of this name, and counts as undamaged."""
        self.remove([pack.name])
        self._packs[pack.name] = pack
        sums = pack.records["data_sum"].tolist()
        for row, offset, data_sum in zip(pack.hashes, pack.offsets.tolist(), sums, strict=True):
            self._places.setdefault(row.tobytes(), []).append(Entry(pack.name, offset, data_sum))

    def remove(self, names: Iterable[str]) -> None:
        """Forget packs that went away; unknown names are ignored."""
        for name in names:
            self._damaged.discard(name)
            pack = self._packs.pop(name, None)
            if pack is not None:
                for row in pack.hashes:
                    self._forget(row.tobytes(), name)

    def drop(self, block_hash: bytes, name: str) -> None:
        """Forget a damaged copy of a block in a pack; the pack's other blocks stay."""
        if name in self._packs:
            self._damaged.add(name)
            self._forget(block_hash, name)

    def check(self) -> None:
        """Raise AssertionError if blocks and packs differ."""
        assert self._damaged <= self._packs.keys(), "a damaged pack that is not known"
        listed: set[tuple[bytes, str]] = set()
        for key, places in self._places.items():
            assert places, "a block without a place"
            listed |= {(key, entry.name) for entry in places}
            assert len(set(places)) == len(places), "a place twice"
        every = {(row.tobytes(), name) for name, pack in self._packs.items() for row in pack.hashes}
        assert listed <= every, "a block in a pack that does not have it"
        missing = {name for _, name in every - listed}
        assert missing <= self._damaged, "a sound pack with a block that is not found"

    def _forget(self, key: bytes, name: str) -> None:
        places = [entry for entry in self._places.get(key, ()) if entry.name != name]
        if places:
            self._places[key] = places
        else:
            self._places.pop(key, None)
