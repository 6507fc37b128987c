"""All groups of a model: the names of their blocks, and which prefixes are held."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.core.wire import HashArray
from penstock.kv.groups.group import KvGroup


@dataclass(frozen=True, slots=True)
class Place:
    """One group, in the order in which blocks at one position of a prompt hang on each other.

    Attributes:
        group: its number in the engine.
        needed: last blocks of a prefix that it needs; None: all.
        mask: (2,) uint64 that makes a prompt's block hash the name of this group's block.
    """

    group: int
    needed: int | None
    mask: NDArray[np.uint64]

    def names(self, block_hashes: HashArray) -> HashArray:
        """Name this group's blocks: (n, 2) uint64, as the hashes of the prompt's blocks."""
        return block_hashes ^ self.mask

    def start(self, end: int) -> int:
        """Return the first block that a prefix of `end` blocks needs."""
        return 0 if self.needed is None else max(0, end - self.needed)


class KvGroups:
    """The groups of one model, whose blocks all have `block_size` tokens.

    Groups over the whole context come first, then windows, the largest first. So at every position of a prompt the groups that
    keep a block are the leading ones. The first group's blocks have the prompt's own hashes, and are the parents in a tier:
    the blocks of one position are a chain that begins with the first group's.
    """

    def __init__(self, groups: Sequence[KvGroup], block_size: int) -> None:
        """Order the groups.

        Args:
            groups: in the engine's order, at least one.
            block_size: tokens in a block of every group.
        """
        needed = [group.needed_blocks(block_size) for group in groups]
        order = sorted(range(len(groups)), key=lambda number: _whole_first(needed[number]))
        self.places = tuple(Place(number, needed[number], _mask(place)) for place, number in enumerate(order))
        self.others = self.places[1:]
        """All but the first."""
        self.is_one_table = not self.others and self.places[0].needed is None
        """Whether every leading block of a prefix is of use."""

    def ends(self, num_leading: int, held: Sequence[NDArray[np.bool_]]) -> NDArray[np.intp]:
        """Return the lengths of all prefixes that are held, ascending, in blocks: a request can go on after each.

        Blocks before the first one here count as held, in groups with a window too.

        Args:
            num_leading: blocks of the first group that are held, from the first on.
            held: for each of the other groups, (num_leading,) whether each block is held.
        """
        lengths = np.arange(num_leading + 1)
        usable = np.ones(num_leading + 1, np.bool_)
        for place, has in zip(self.others, held, strict=True):
            missing = np.concatenate([[0], np.cumsum(~has)])
            first = lengths * 0 if place.needed is None else np.maximum(lengths - place.needed, 0)
            usable &= missing[lengths] == missing[first]
        return np.flatnonzero(usable)

    def to_load(self, end: int) -> list[tuple[Place, range]]:
        """Return the blocks that a prefix of `end` blocks takes, by group."""
        return [(place, range(place.start(end), end)) for place in self.places]

    def chain(self, block_hash: HashArray, places: Sequence[Place]) -> HashArray:
        """Name the blocks of one position: the first group's, and those of `places`, its next ones.

        Args:
            block_hash: (1, 2) uint64 of the prompt's block.
            places: leading ones of `others`.
        """
        return np.concatenate([block_hash, *(place.names(block_hash) for place in places)])

    def place_of(self, block_hash: int, parent: int | None) -> int:
        """Return which group's a stored block is, by the low halves of its name and its parent's; 0: the first group's."""
        if parent is None:
            return 0
        between = block_hash ^ parent
        before = 0
        for number, place in enumerate(self.others, 1):
            low = int(place.mask[0])
            if between == before ^ low:
                return number
            before = low
        return 0


def _whole_first(needed: int | None) -> float:
    return float("-inf") if needed is None else -needed


def _mask(place: int) -> NDArray[np.uint64]:
    if not place:
        return np.zeros(2, np.uint64)
    digest = hashlib.blake2b(f"penstock kv group {place}".encode(), digest_size=16).digest()
    return np.frombuffer(digest, "<u8").astype(np.uint64)
