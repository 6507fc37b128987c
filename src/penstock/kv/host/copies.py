"""Copies between the device and a host's arena, on threads: pieces of several MB, each verified after it was copied."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from penstock.core.ids import BlockId
from penstock.kv.device_blocks import DeviceBlocks
from penstock.kv.host.sibling import Sibling
from penstock.transfer.regions.checksum import copy_summed
from penstock.transfer.regions.ranges import Numbers, Stop
from penstock.transfer.storage.slots import Records

_PIECE_BYTES = 8 << 20
"""Copied and verified at once; a cancelled load ends within one piece."""
_THREADS = 2
"""Of one copy: one core of most machines does not use up their memory's bandwidth."""


@dataclass(slots=True, eq=False)
class Piece:
    """Consecutive blocks of a prefix in one extent; `sibling` is None for the own one."""

    sibling: Sibling | None
    slots: list[BlockId]


@dataclass(slots=True, eq=False)
class HostLoad:
    """A load under way; another thread copies until `stop` is set.

    Attributes:
        pieces: where the blocks are.
        sources: (n,) addresses.
        records: (n,) of the blocks, before they were copied.
        targets: (n,) device blocks.
    """

    pieces: list[Piece]
    sources: Numbers
    records: Records
    targets: list[BlockId]
    stop: Stop = field(default_factory=lambda: np.zeros(1, np.uint8))
    seconds: float = 0.0

    def cancel(self, *, is_late: bool = False) -> None:  # noqa: ARG002 - memory is slow where the host is busy
        """Ask it to end soon."""
        self.stop[0] = 1

    def place(self, index: int) -> Piece:
        """Return a piece that has block `index` alone."""
        for piece in self.pieces:
            if index < len(piece.slots):
                return Piece(piece.sibling, [piece.slots[index]])
            index -= len(piece.slots)
        raise IndexError(index)


def copy_to_device(device: DeviceBlocks, load: HostLoad) -> int:
    """Copy and verify one piece after another; returns how many leading blocks are complete."""
    started_s = perf_counter()
    try:
        return _copy_pieces(device, load)
    finally:
        load.seconds = perf_counter() - started_s


def _copy_pieces(device: DeviceBlocks, load: HostLoad) -> int:
    each = max(1, _PIECE_BYTES // device.block_bytes)
    for start in range(0, len(load.targets), each):
        piece = slice(start, start + each)
        targets = device.addresses(load.targets[piece])
        lengths = np.full(len(targets), device.block_bytes, np.uint64)
        sums = copy_summed(targets, load.sources[piece], lengths, _THREADS, load.stop)
        if sums is None:
            return start
        wrong = np.flatnonzero(sums != load.records["data_sum"][piece])
        if len(wrong):
            return start + int(wrong[0])
    return len(load.targets)


def copy_from_device(
    device: DeviceBlocks, sources: Sequence[BlockId], targets: Numbers, records: Records
) -> None:
    """Copy (n,) device blocks to addresses, and write the checksums of the copies into their records."""
    each = max(1, _PIECE_BYTES // device.block_bytes)
    for start in range(0, len(sources), each):
        piece = slice(start, start + each)
        lengths: NDArray[np.uint64] = np.full(len(targets[piece]), device.block_bytes, np.uint64)
        sums = copy_summed(targets[piece], device.addresses(sources[piece]), lengths, _THREADS)
        assert sums is not None, "nothing stops it"
        records["data_sum"][piece] = sums
