"""The prefixes that other regions advertise in their summaries, as chunks, by slot of the link to each region."""

import asyncio
import math
from collections.abc import Callable, Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.core.types.events import AllBlocksCleared, BlockRemoved, BlockStored, EventSnapshot, KvEvent
from penstock.core.types.kv import blocks_per_chunk, chunk_ends, chunk_hashes
from penstock.core.wire import HashArray, unpack_hashes
from penstock.router.index.radix import PrefixMatch, RadixTree

_CHUNKS_MAX = 1_000_000
_HASH_BYTES = 8
_WEIGHT = 0.25
"""Of one answer: after three answers that found nothing, less than half of what the region advertises counts."""
_FORGIVEN_S = 60.0


class AdvertisedShare:
    """The share of a region's advertised prefixes that its answers confirm. One event loop owns it."""

    def __init__(self, now_s: float) -> None:
        """Begin with all of them."""
        self._share = 1.0
        self._learnt_s = now_s

    def at(self, now_s: float) -> float:
        """Give the share. The distance from 1 halves every `_FORGIVEN_S`, since a region without requests has no answers to raise it."""
        return 1.0 - (1.0 - self._share) * math.exp2((self._learnt_s - now_s) / _FORGIVEN_S)

    def learn(self, expected_tokens: int, cached_tokens: int, now_s: float) -> None:
        """Take an answer into account; `expected_tokens` were this share of the advertised ones."""
        if expected_tokens <= 0:
            return
        share = self.at(now_s)
        seen = min(share * cached_tokens / expected_tokens, 1.0)
        self._share, self._learnt_s = share + _WEIGHT * (seen - share), now_s


class RegionIndex:
    """A radix tree of chunks, beside the tree of blocks. One event loop owns it.

    In a link's events a "block" is a chunk, and `block_size` is the chunk's.
    """

    def __init__(
        self,
        on_count: Callable[[int], object] = lambda _: None,
        clock: Callable[[], float] = lambda: asyncio.get_running_loop().time(),
    ) -> None:
        """Know nothing yet; `on_count` is called with `num_chunks` after each change, and `clock` gives seconds."""
        self._tree = RadixTree(_CHUNKS_MAX)
        self._on_count = on_count
        self._clock = clock
        self._shares: dict[int, AdvertisedShare] = {}  # by slot; 1 without one

    @property
    def num_chunks(self) -> int:
        """Number of (link, chunk) pairs."""
        return self._tree.stats().pairs

    def advertised_by(self, slot: int) -> int:
        """Count the chunks that a link's region advertises."""
        return self._tree.held_blocks(slot)

    def apply(self, slot: int, events: Sequence[KvEvent], block_size: int) -> int:
        """Apply the events of a link in order; give the number of events skipped, of another size or malformed.

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
                case BlockStored(block_size=chunk_tokens) if chunk_tokens == size:
                    chunks = unpack_hashes(event.block_hashes)
                    for index in range(len(chunks)):  # one by one: neighbours here are not parent and child
                        self._tree.store(slot, chunks[index : index + 1], None)
                case _:
                    left_out += 1
        self._on_count(self.num_chunks)
        return left_out

    def replace(self, slot: int, part: EventSnapshot, block_size: int) -> None:
        """Store a part of a snapshot; the first part replaces all chunks of the link."""
        if part.chunk == 0:
            self._tree.clear(slot)
        self.apply(slot, part.events, block_size)

    def found(self, slot: int, expected_tokens: int, cached_tokens: int) -> float:
        """Learn from an answer how much of what a region advertises is there.

        Args:
            slot: of its link.
            expected_tokens: cached tokens that were expected there, at the share so far.
            cached_tokens: cached tokens in the region's answer.

        Returns:
            The share that counts from now on.
        """
        now_s = self._clock()
        share = self._shares.setdefault(slot, AdvertisedShare(now_s))
        share.learn(expected_tokens, cached_tokens, now_s)
        return share.at(now_s)

    def forget(self, slot: int) -> None:
        """Forget a link."""
        self._shares.pop(slot, None)
        if slot < self._tree.num_slots:
            self._tree.clear(slot)
            self._on_count(self.num_chunks)

    def deepened(
        self, match: PrefixMatch, hashes: HashArray, block_size: int, slots: Collection[int]
    ) -> PrefixMatch:
        """Give a match in which a link has the leading blocks that its region advertises, where these are more.

        Only the share that the region's answers have confirmed counts.

        Args:
            match: of the tree of blocks.
            hashes: (n,) uint64, of the prompt's full blocks.
            block_size: tokens of a block.
            slots: of the links.
        """
        chunks = self._tree.match(chunk_hashes(hashes, block_size)).depths
        advertised: NDArray[np.int32] = np.zeros_like(match.depths)
        known = [slot for slot in slots if slot < len(chunks)]
        advertised[known] = np.concatenate(([0], chunk_ends(block_size)))[chunks[known]]
        for slot, share in self._shares.items():
            if slot < len(advertised):
                advertised[slot] = int(advertised[slot] * share.at(self._clock()))
        if not (advertised > match.depths).any():
            return match
        tiers = match.tiers.copy()
        tiers[0] += np.maximum(advertised - match.depths, 0)
        return PrefixMatch(np.maximum(match.depths, advertised), tiers)

    def check(self) -> None:
        """Raise AssertionError where the tree is broken."""
        self._tree.check()
