"""Copies between two places in this process's address space, its own memory or another's that it has mapped."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor

import numpy as np

from penstock.core.descriptors import OffsetArray
from penstock.core.errors import ChecksumMismatch
from penstock.transfer.checksum import checksum_ranges
from penstock.transfer.ranges import copy_ranges
from penstock.transfer.waiting import settled

_SLICE_BYTES = 16 << 20
"""Copied between two looks at whether it was cancelled: about 2 ms, so that a lost peer is an error soon."""


class CopyMove:
    """Copies ranges from addresses to addresses: the `Move` of transports that reach memory directly."""

    def __init__(
        self,
        targets: OffsetArray,
        sources: OffsetArray,
        lengths: OffsetArray,
        *,
        executor: Executor,
        threads: int,
        inline_bytes_max: int,
        checksum: bool,
    ) -> None:
        """Know what to copy.

        Args:
            targets: (n,) uint64 addresses.
            sources: (n,) uint64 addresses.
            lengths: (n,) uint64 bytes.
            executor: runs what is too long for a turn of the loop.
            threads: native threads that share one copy.
            inline_bytes_max: what is not.
            checksum: whether to compare what arrived.
        """
        self._targets = targets
        self._sources = sources
        self._lengths = lengths
        self._executor = executor
        self._threads = threads
        self._is_small = int(lengths.sum()) <= inline_bytes_max
        self._checksum = checksum
        self._slices = _cut(lengths)

    def run_now(self) -> bool:
        if not self._is_small:
            return False
        copy_ranges(self._targets, self._sources, self._lengths)
        self._check()
        return True

    async def run(self) -> None:
        await on_thread(self._executor, self._copy)

    def _copy(self, is_cancelled: Callable[[], bool]) -> None:
        for first, end in self._slices:
            if is_cancelled():
                return
            part = slice(first, end)
            copy_ranges(self._targets[part], self._sources[part], self._lengths[part], self._threads)
        self._check()

    def _check(self) -> None:
        if self._checksum:
            sent = checksum_ranges(self._sources, self._lengths)
            arrived = checksum_ranges(self._targets, self._lengths)
            if not np.array_equal(sent, arrived):
                index = int(np.argmax(sent != arrived))
                raise ChecksumMismatch(
                    f"range {index}, {int(self._lengths[index])} bytes: checksum {int(arrived[index]):#x} after the copy,"
                    f" {int(sent[index]):#x} at the source: somebody writes there meanwhile"
                )


async def on_thread(executor: Executor, work: Callable[[Callable[[], bool]], None]) -> None:
    """Run work that looks now and then whether it was cancelled; a cancellation waits until it has seen so.

    Args:
        executor: its threads.
        work: gets a function that says whether to stop; what it raises is raised here.
    """
    cancelled = False
    future = asyncio.get_running_loop().run_in_executor(executor, work, lambda: cancelled)
    try:
        await asyncio.shield(future)
    except asyncio.CancelledError:
        cancelled = True
        await settled(future)
        raise


def _cut(lengths: OffsetArray) -> list[tuple[int, int]]:
    """Cut a list into runs of about `_SLICE_BYTES`; a range is never cut (`copy_ranges` shares long ones)."""
    if len(lengths) == 0:
        return []
    slice_of = (np.cumsum(lengths) - lengths) // np.uint64(_SLICE_BYTES)
    first = [0, *(int(index) + 1 for index in np.flatnonzero(np.diff(slice_of)))]
    return list(zip(first, [*first[1:], len(lengths)], strict=True))
