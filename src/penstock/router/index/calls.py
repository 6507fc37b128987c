"""What the native radix tree and its Python reference share: results, and calls built on other calls."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.core.hashing import DEFAULT_KEY, as_tokens, root_hash
from penstock.core.types.events import Copies, Tier
from penstock.core.wire import HashArray, PackedHashes, TokenArray, unpack_hashes

_TIERS = tuple(Tier)


class PrefixMatch:
    """What each worker holds of a prefix; for several prefixes the arrays have one more dimension in front.

    `depths` is (num_slots,) int32: the leading blocks that a worker holds in any tier. `tiers` is
    (num_tiers, num_slots) int32: how many of these lie in each tier, nearest tier first; a block counts in its nearest tier.
    """

    __slots__ = ("_tiers", "depths")

    def __init__(self, depths: NDArray[np.int32], tiers: NDArray[np.int32] | None = None) -> None:
        """Without `tiers` all blocks lie in the first tier."""
        self.depths = depths
        self._tiers = tiers

    @property
    def tiers(self) -> NDArray[np.int32]:
        if self._tiers is None:
            lower = np.zeros_like(self.depths)
            self._tiers = np.stack([self.depths, *[lower] * (len(_TIERS) - 1)], axis=-2)
        return self._tiers


class RadixStats(NamedTuple):
    """`pairs` counts (worker, block); `evicted_pairs` were forgotten for want of room.

    `unknown_removals` are removals of what was not held: of evicted pairs, or an engine's error.
    `contradictions` are blocks told with another parent than before, which is an engine's error. `num_bytes` is the
    memory in use; the Python reference counts its largest tables only.
    """

    nodes: int
    pairs: int
    evicted_pairs: int
    unknown_removals: int
    contradictions: int
    num_bytes: int


class HeldBlocks(NamedTuple):
    """One copy of each block of a chain; the arguments of `store`."""

    worker: int
    hashes: PackedHashes
    parent: int | None
    tier: Tier


class _Tree(Protocol):
    @property
    def num_slots(self) -> int: ...

    def counts(self) -> tuple[int, int, int, int, int, int]: ...

    def runs(self, worker: int) -> list[tuple[PackedHashes, int | None, Copies]]: ...

    def match_packed_tokens(
        self, tokens: TokenArray, block_size: int, first: tuple[int, int], key: bytes
    ) -> PrefixMatch: ...


class RadixCalls:
    """Calls of both trees."""

    def match_tokens(
        self: _Tree,
        token_ids: Sequence[int] | TokenArray | bytes,
        block_size: int,
        salt: bytes = b"",
        *,
        key: bytes = DEFAULT_KEY,
    ) -> PrefixMatch:
        """Hash a prompt's full blocks as `block_hashes` does, and match them.

        Raises:
            ValueError: as `block_hashes`.
        """
        if block_size < 1:
            raise ValueError(f"block_size: must be >= 1, got {block_size}")
        first = root_hash(block_size, salt, key=key)
        return self.match_packed_tokens(as_tokens(token_ids), block_size, first, key)

    def snapshot(self: _Tree, worker: int | None = None) -> Iterator[HeldBlocks]:
        """Give the content of all workers or of one, as calls of `store`: parents before children."""
        for slot in range(self.num_slots) if worker is None else (worker,):
            for hashes, parent, copies in self.runs(slot):
                for tier, count in zip(_TIERS, copies, strict=True):
                    for _ in range(count):
                        yield HeldBlocks(slot, hashes, parent, tier)

    def hashes_of(self: _Tree, worker: int) -> HashArray:
        """Give the distinct blocks a worker is known to hold, parents before children."""
        return unpack_hashes(b"".join(hashes for hashes, _, _ in self.runs(worker)))

    def stats(self: _Tree) -> RadixStats:
        return RadixStats._make(self.counts())
