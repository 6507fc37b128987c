"""Which prefixes other regions hold, as their summaries say: by slot of the link to each, in chunks."""

from collections.abc import Callable, Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.core.types.events import AllBlocksCleared, BlockRemoved, BlockStored, EventSnapshot, KvEvent
from penstock.core.types.kv.summary import blocks_per_chunk, chunk_ends, chunk_hashes
from penstock.core.wire import HashArray, unpack_hashes
from penstock.router.index.radix import PrefixMatch, RadixTree

_CHUNKS_MAX = 1_000_000
_HASH_BYTES = 8


class RegionIndex:
    """A tree of its own, since chunks have no place in the tree of blocks. One event loop owns it.

    The events of a link are of chunks: `block_size` is that of a chunk.
    """

    def __init__(self, on_count: Callable[[int], object] = lambda _: None) -> None:
        """Know nothing yet; `on_count` is called with `num_chunks` after each change."""
        self._tree = RadixTree(_CHUNKS_MAX)
        self._on_count = on_count

    @property
    def num_chunks(self) -> int:
        """(link, chunk) pairs that are told now."""
        return self._tree.stats().pairs

    def told_by(self, slot: int) -> int:
        """Count the chunks that a link tells now."""
        return self._tree.held_blocks(slot)

    def apply(self, slot: int, events: Sequence[KvEvent], block_size: int) -> int:
        """Apply the events of a link, in order, and give how many were left out: of other sizes, or malformed.

        Args:
            slot: of the link.
            events: of its chunks.
            block_size: tokens of a block of its model.
        """
        size, left_out = block_size * blocks_per_chunk(block_size), 0
        for event in events:
            match event:
                case AllBlocksCleared():
                    self._tree.clear(slot)
                case _ if len(event.block_hashes) % _HASH_BYTES:
                    left_out += 1
                case BlockRemoved():
                    self._tree.remove(slot, event.block_hashes)
                case BlockStored(block_size=told) if told == size:
                    chunks = unpack_hashes(event.block_hashes)
                    for index in range(len(chunks)):  # one by one: neighbours here are no chain
                        self._tree.store(slot, chunks[index : index + 1], None)
                case _:
                    left_out += 1
        self._on_count(self.num_chunks)
        return left_out

    def replace(self, slot: int, part: EventSnapshot, block_size: int) -> None:
        """Store a part of a snapshot; the first replaces all that was told."""
        if part.chunk == 0:
            self._tree.clear(slot)
        self.apply(slot, part.events, block_size)

    def forget(self, slot: int) -> None:
        """Forget a link."""
        if slot < self._tree.num_slots:
            self._tree.clear(slot)
            self._on_count(self.num_chunks)

    def deepened(
        self, match: PrefixMatch, hashes: HashArray, block_size: int, slots: Collection[int]
    ) -> PrefixMatch:
        """Give a match in which links have the leading blocks that their regions told, where these are more.

        Args:
            match: of the tree of blocks.
            hashes: (n,) uint64, of the prompt's full blocks.
            block_size: tokens of a block.
            slots: of the links.
        """
        chunks = self._tree.match(chunk_hashes(hashes, block_size)).depths
        told: NDArray[np.int32] = np.zeros_like(match.depths)
        known = [slot for slot in slots if slot < len(chunks)]
        told[known] = np.concatenate(([0], chunk_ends(block_size)))[chunks[known]]
        if not (told > match.depths).any():
            return match
        tiers = match.tiers.copy()
        tiers[0] += np.maximum(told - match.depths, 0)
        return PrefixMatch(np.maximum(match.depths, told), tiers)

    def check(self) -> None:
        """Raise AssertionError where the tree is broken."""
        self._tree.check()
