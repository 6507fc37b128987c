"""The KV source seam: blocks outside an engine's device that can be loaded into it; a tier also takes blocks from it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.core.ids import BlockId
from penstock.core.types.events import KvEvent, Tier
from penstock.core.types.instances import KvHolder
from penstock.core.wire import HashArray


class KvLoad(Protocol):
    """A load under way."""

    def cancel(self, *, is_late: bool = False) -> None:
        """Ask it to end soon; its `done` is still called. No error if it has ended.

        Args:
            is_late: the load took too long; a tier may count this as a failure.
        """
        ...


class KvSource(Protocol):
    """Loads KV blocks by their hash into an engine's device blocks: a tier, or another worker.

    One task owns it; copies run on threads of its own, and none of its methods blocks. Blocks that it reports as loaded are
    verified.
    """

    @property
    def is_off(self) -> bool:
        """Whether it is not used for a while, since it failed or hung."""
        ...

    @property
    def num_corrupt(self) -> int:
        """Blocks whose bytes did not match their checksum, since start; they are never served."""
        ...

    @property
    def chunk_blocks(self) -> int:
        """Most blocks of one load, at least 1. Longer prefixes come by several loads in order, two at a time: enough for full speed."""
        ...

    def locate(self, block_hashes: HashArray) -> int:
        """Count the leading blocks that it has.

        Args:
            block_hashes: (n, 2) uint64, each the child of the one before it; the first may be in the middle of a prompt.
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
            targets: (n,) device blocks, reserved until `done` is called.
            done: called once on the event loop with the number of complete leading blocks, after the last write to a target;
                soon after `cancel`, and after errors too. Never called by `load` itself.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class KvRun:
    """Consecutive blocks of a prefix that one source has.

    Attributes:
        source: the source.
        block_hashes: (n, 2) uint64.
        num_before: blocks of the prefix before these.
    """

    source: KvSource
    block_hashes: HashArray
    num_before: int

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return len(self.block_hashes)


@dataclass(frozen=True, slots=True, eq=False)
class KvNames:
    """The blocks that a prompt needs of another worker, in the order of a transfer.

    Attributes:
        hashes: (n, 2) uint64, their names: those of the prompt's blocks, and in models with several groups of layers then those of
            the last window.
        parents: (n - num_leading,) uint64, the low half of the name that each block after the prompt's own hangs on.
        num_leading: the prompt's blocks.
    """

    hashes: HashArray
    parents: NDArray[np.uint64]
    num_leading: int

    def chains(self, first: int, end: int) -> Iterator[tuple[int, int, int | None]]:
        """Divide blocks `first` to `end` into runs of which each block is the child of the one before: (first, end, parent)."""
        start = first
        while start < end:
            stop = start + 1
            while stop < end and self._parent(stop) == int(self.hashes[stop - 1, 0]):
                stop += 1
            yield start, stop, self._parent(start)
            start = stop

    def _parent(self, index: int) -> int | None:
        if index >= self.num_leading:
            return int(self.parents[index - self.num_leading])
        return int(self.hashes[index - 1, 0]) if index else None


class KvTier(KvSource, Protocol):
    """A source that blocks are offloaded to: keeps them by their hash.

    Attributes:
        tier: where it keeps them, for events.
        num_blocks: how many it can keep.
        block_bytes: size of one.
        shared: whose blocks it loads, those of other workers among them; None for blocks of its own.
    """

    tier: Tier
    num_blocks: int
    block_bytes: int
    shared: KvHolder | None

    def probe(self) -> float | None:
        """Measure bytes per second of loads before anything was loaded, and keep nothing; None where that is not possible.

        Takes up to two seconds. Called on any thread, before `start`.
        """
        ...

    def start(self, on_change: Callable[[], None]) -> None:
        """Begin, on the event loop and before any other method.

        Args:
            on_change: to be called when it has events or room that no `done` tells of.
        """
        ...

    @property
    def num_cached(self) -> int:
        """Blocks that it keeps."""
        ...

    @property
    def offload_room(self) -> int:
        """Blocks that `offload` would take now; others wait on the device."""
        ...

    def offload(
        self, block_hashes: HashArray, block_ids: Sequence[BlockId], done: Callable[[Sequence[BlockId]], None]
    ) -> Sequence[BlockId]:
        """Begin to copy the blocks of a prefix that it does not keep yet from the device.

        Args:
            block_hashes: (n, 2) uint64 of a prefix, from its first block on.
            block_ids: (n,) the device blocks.
            done: called once with the returned blocks, later on the event loop, after their last read; never if none are
                returned.

        Returns:
            the device blocks that it reads; empty if it keeps all of them already, or has no room.
        """
        ...

    def take_events(self) -> tuple[KvEvent, ...]:
        """Return the KV events since the last call, in order: of all blocks that it can load. Who asks notes their holder."""
        ...

    def clear(self) -> None:
        """Forget all blocks."""
        ...

    async def close(self) -> None:
        """End all copies and release everything. Safe twice."""
        ...
