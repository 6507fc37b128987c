"""A slab against a byte array: writes of any ranges, torn writes, bits that flip, crashes and restarts.

What is read is what was written or an error, whatever happens.
"""

import errno
import os
import shutil
import tempfile
import zlib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from penstock.core.errors import ChecksumMismatch, TransferError
from penstock.transfer.storage.block_sums import BLOCK_BYTES
from penstock.transfer.storage.extents import Extents
from penstock.transfer.storage.io_threads import Bounce
from penstock.transfer.storage.slab import SUMS_SUFFIX, Slab
from penstock.transfer.storage.slab_sums import _CHECK, _HEADER

BLOCKS = 12
SIZE = BLOCKS * BLOCK_BYTES
IO_BYTES = 4 * BLOCK_BYTES


class _FaultyDisk:
    """Moves less than it is asked to, and tears the write that is planted."""

    def __init__(self) -> None:
        self.tear_after: int | None = None
        self.moves_at_most = SIZE
        self.torn: list[tuple[int, int]] = []

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, self._first(buffers, self.moves_at_most), offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self.tear_after is None:
            return os.pwritev(fd, self._first(buffers, self.moves_at_most), offset)
        self.torn.append((offset, offset + sum(map(len, buffers))))
        whole = b"".join(buffers)[: self.tear_after]
        # A disk writes sectors, whatever it was told: not even a block is written all or nothing.
        with Path(f"/proc/self/fd/{fd}").open("r+b") as file:
            file.seek(offset)
            file.write(whole)
        raise OSError(errno.EIO, "planted")

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    @staticmethod
    def _first(buffers: Sequence[memoryview], most: int) -> list[memoryview]:
        taken = []
        for buffer in buffers:
            taken.append(buffer[:most])
            most -= len(taken[-1])
            if not most:
                break
        return taken


@st.composite
def _ranges(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Ranges that do not overlap: [(start, end)], in any order."""
    edge = st.integers(0, BLOCKS).map(lambda block: block * BLOCK_BYTES)
    near = st.builds(lambda at, by: min(at + by, SIZE), edge, st.sampled_from([1, 100, 512, 3000]))
    cut = draw(st.sampled_from([edge, st.one_of(edge, near), st.integers(0, SIZE)]))
    cuts = draw(st.lists(cut, min_size=2, max_size=8, unique=True).map(sorted))
    pairs = list(zip(cuts[::2], cuts[1::2], strict=False))
    if draw(st.booleans()) and len(cuts) > 2:  # neighbours, too
        pairs = list(pairwise(cuts))
    return draw(st.permutations(pairs))


class SlabMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.generation = 0
        self.disk = _FaultyDisk()
        self.slab = Slab(self.path, SIZE, self.disk)
        self.bounce = Bounce(IO_BYTES)
        self.model = bytearray(SIZE)
        self.choices: list[set[bytes] | None] = [None] * BLOCKS
        """What a block may be read as; None where it may not be read. More than one, or none, after an accident."""
        self.in_doubt = [False] * BLOCKS
        self.arena = np.zeros(SIZE + 2 * BLOCK_BYTES, np.uint8)
        self.aligned = -self.arena.ctypes.data % BLOCK_BYTES

    @property
    def path(self) -> Path:
        return self.directory / f"slab{self.generation}"

    @initialize(most=st.sampled_from([BLOCK_BYTES, 3 * BLOCK_BYTES, SIZE]))
    def choose_disk(self, most: int) -> None:
        self.disk.moves_at_most = most

    def teardown(self) -> None:
        self.slab.close()
        shutil.rmtree(self.directory)

    # -- what happens -------------------------------------------------------------------------------------------------

    @rule(ranges=_ranges(), seed=st.integers(0, 255), shift=st.sampled_from([0, 0, 8]))
    def write(self, ranges: list[tuple[int, int]], seed: int, shift: int) -> None:
        data = np.random.default_rng(seed).integers(0, 256, SIZE, np.uint8)
        for index, extents in self._plan(ranges, data, shift):
            start, end = extents.starts[index], extents.ends[index]
            partly = [] if extents.whole[index] else extents.partial_blocks(index)
            bad = [block for block in partly if self.in_doubt[block]]
            try:
                self.slab.write(extents, index, self.bounce)
            except ChecksumMismatch:
                assert bad, f"blocks {partly} are sound"
                continue
            self._written(ranges, data, start, end, partly)

    @rule(ranges=_ranges(), seed=st.integers(0, 255), after=st.integers(0, IO_BYTES))
    def tear_write(self, ranges: list[tuple[int, int]], seed: int, after: int) -> None:
        data = np.random.default_rng(seed).integers(0, 256, SIZE, np.uint8)
        self.disk.tear_after, self.disk.torn = after, []
        for index, extents in self._plan(ranges, data, 0):
            with pytest.raises(TransferError):
                self.slab.write(extents, index, self.bounce)
        self.disk.tear_after = None
        for start, end in self.disk.torn:
            self._doubt(start, end)

    @rule(at=st.integers(0, SIZE * 8 - 1))
    def flip_bit(self, at: int) -> None:
        block = at // 8 // BLOCK_BYTES
        with self.path.open("r+b") as file:
            file.seek(at // 8)
            (byte,) = file.read(1)
            file.seek(at // 8)
            file.write(bytes([byte ^ 1 << at % 8]))
        self.in_doubt[block] = True

    @rule()
    def close_and_reopen(self) -> None:
        self.slab.close()
        self.slab = Slab(self.path, SIZE, self.disk)

    @rule()
    def crash_and_reopen(self) -> None:
        """What a killed process leaves is what is in its files now."""
        self._move_on()

    @rule()
    def cut_power(self) -> None:
        """The machine comes up under another boot id, and the slab was not closed."""
        self._move_on(boot_id=b"another boot ...")
        self.choices = [None] * BLOCKS
        self.in_doubt = [False] * BLOCKS

    # -- what has to hold ---------------------------------------------------------------------------------------------

    @rule(ranges=_ranges(), shift=st.sampled_from([0, 8]))
    def read(self, ranges: list[tuple[int, int]], shift: int) -> None:
        for at, end in ranges:
            self._check_read(at, end, shift)

    @invariant()
    def every_block_is_what_it_may_be(self) -> None:
        for block in range(BLOCKS):
            self._check_read(block * BLOCK_BYTES, (block + 1) * BLOCK_BYTES, 0)

    def _check_read(self, at: int, end: int, shift: int) -> None:
        into = np.zeros(SIZE, np.uint8)
        blocks = range(at // BLOCK_BYTES, -(-end // BLOCK_BYTES))
        try:
            for index, extents in self._plan([(at, end)], into, shift):
                self.slab.read(extents, index, self.bounce, checksum=True)
        except ChecksumMismatch:
            assert any(self.choices[block] is None or self.in_doubt[block] for block in blocks), (
                "all are sound"
            )
            return
        found = self._taken(shift)
        for block in blocks:
            begin, stop = max(at, block * BLOCK_BYTES), min(end, (block + 1) * BLOCK_BYTES)
            choices = self.choices[block]
            assert choices is not None, f"block {block} was read, and is not what was written"
            part = slice(begin - block * BLOCK_BYTES, stop - block * BLOCK_BYTES)
            assert found[begin:stop] in {choice[part] for choice in choices}, f"block {block}"

    # -- inside -------------------------------------------------------------------------------------------------------

    def _plan(self, ranges: list[tuple[int, int]], data: np.ndarray, shift: int) -> list[tuple[int, Extents]]:
        """Put data into the arena, each byte where the file will have it, and plan the I/Os."""
        start = self.aligned + shift
        self.arena[start : start + SIZE] = data
        offsets = np.array([a for a, _ in ranges], np.uint64)
        extents = Extents.plan(
            np.ones(len(ranges), np.uint64),
            offsets,
            offsets + np.uint64(self.arena.ctypes.data + start),
            np.array([b - a for a, b in ranges], np.uint64),
            io_bytes=IO_BYTES,
        )
        return [(index, extents) for index in range(len(extents))]

    def _taken(self, shift: int) -> bytes:
        start = self.aligned + shift
        return self.arena[start : start + SIZE].tobytes()

    def _written(
        self, ranges: list[tuple[int, int]], data: np.ndarray, start: int, end: int, partly: list[int]
    ) -> None:
        for block in range(start // BLOCK_BYTES, end // BLOCK_BYTES):
            begin, stop = block * BLOCK_BYTES, (block + 1) * BLOCK_BYTES
            choices = self.choices[block]
            before = {bytes(BLOCK_BYTES)} if choices is None else choices
            if block not in partly:
                before = {bytes(BLOCK_BYTES)}
            after = set()
            for choice in before:
                content = bytearray(choice)
                for a, b in ranges:
                    low, high = max(a, begin), min(b, stop)
                    if low < high:
                        content[low - begin : high - begin] = data[low:high].tobytes()
                after.add(bytes(content))
            self.choices[block] = after
            self.in_doubt[block] = False

    def _doubt(self, start: int, end: int) -> None:
        """Blocks that may be as they were, or unreadable; none reads as a mixture."""
        for block in range(start // BLOCK_BYTES, end // BLOCK_BYTES):
            self.in_doubt[block] = True

    def _move_on(self, boot_id: bytes | None = None) -> None:
        before = self.path
        self.generation += 1
        shutil.copy(before, self.path)
        sums = Path(f"{self.path}{SUMS_SUFFIX}")
        shutil.copy(f"{before}{SUMS_SUFFIX}", sums)
        if boot_id is not None:
            with sums.open("r+b") as file:
                magic, block, state, size, _ = _HEADER.unpack(file.read(_HEADER.size))
                packed = _HEADER.pack(magic, block, state, size, boot_id)
                file.seek(0)
                file.write(packed + _CHECK.pack(zlib.crc32(packed)))
        self.slab.close()
        self.slab = Slab(self.path, SIZE, self.disk)


TestSlabMachine = pytest.mark.slow(SlabMachine.TestCase)
TestSlabMachine.settings = settings(max_examples=12, stateful_step_count=12)
