"""The KV tier seam: blocks kept outside of an engine's device, and their copies to and from the device's blocks."""

from collections.abc import Callable, Sequence
from typing import Protocol

from penstock.core.ids import BlockId
from penstock.core.types.events import KvEvent, Tier
from penstock.core.wire import HashArray


class KvLoad(Protocol):
    """A load under way."""

    def cancel(self, *, is_late: bool = False) -> None:
        """Ask it to end soon; its `done` is still called. No error if it has ended.

        Args:
            is_late: it took too long, which a tier may count as its failure.
        """
        ...


class KvTier(Protocol):
    """Keeps KV blocks by their hash. One task owns it; copies run on threads of its own, and none of its methods blocks.

    Attributes:
        tier: where it keeps them, for events.
        num_blocks: how many it can keep.
        block_bytes: size of one.
    """

    tier: Tier
    num_blocks: int
    block_bytes: int

    @property
    def num_cached(self) -> int:
        """Blocks that it keeps."""
        ...

    @property
    def is_off(self) -> bool:
        """Whether it is left alone for a while, since it failed or hung."""
        ...

    @property
    def num_corrupt(self) -> int:
        """Blocks that were not as they were stored, since start; they are never served."""
        ...

    def locate(self, block_hashes: HashArray) -> int:
        """Count the leading blocks that it keeps.

        Args:
            block_hashes: (n, 2) uint64, each the child of the one before it.
        """
        ...

    def load_s(self, num_blocks: int) -> float:
        """Predict the seconds until so many blocks are loaded, behind the loads under way; 0 before the first was measured."""
        ...

    def load(
        self, block_hashes: HashArray, targets: Sequence[BlockId], done: Callable[[int], None]
    ) -> KvLoad:
        """Copy leading blocks to the device, and verify them.

        Args:
            block_hashes: (n, 2) uint64, of blocks that `locate` has counted.
            targets: (n,) device blocks, which nobody else writes until `done` is called.
            done: called once, on the event loop, when targets are written no more, with the number of leading blocks that
                are complete. It is called soon after `cancel`, and also after errors.
        """
        ...

    def offload(
        self, block_hashes: HashArray, block_ids: Sequence[BlockId], done: Callable[[Sequence[BlockId]], None]
    ) -> Sequence[BlockId]:
        """Begin to copy those of a prefix's blocks that it lacks from the device.

        Args:
            block_hashes: (n, 2) uint64 of a prefix, from its first block on.
            block_ids: (n,) the device blocks.
            done: called once with the returned blocks, on the event loop and later, when they are read no more; never if there
                are none.

        Returns:
            the blocks it reads; empty if it has all of them, or no room.
        """
        ...

    def take_events(self) -> tuple[KvEvent, ...]:
        """Return the KV events since the last call, in order."""
        ...

    def clear(self) -> None:
        """Forget all blocks."""
        ...

    async def close(self) -> None:
        """End all copies and release everything. Safe twice."""
        ...
