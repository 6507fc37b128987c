"""A stored object: header, checksum of each block, data.

It is put as a whole, so data and checksums belong together.
"""

import struct
import zlib

import numpy as np

from penstock.core.errors import ChecksumMismatch
from penstock.transfer.regions.checksum import Sums
from penstock.transfer.regions.ranges import copy_ranges
from penstock.transfer.storage.block_sums import BLOCK_BYTES, sum_memory
from penstock.transfer.storage.extents import Extents

_MAGIC = b"pstkobj1"
_HEADER = struct.Struct("<8sIQQ")  # magic, block, index, bytes of data
_CHECK = struct.Struct("<I")
_SUMS_OFFSET = _HEADER.size + _CHECK.size


def head_bytes(data_bytes: int) -> int:
    """Give the bytes before the data: 28 + 4, and 4 for each block."""
    return _SUMS_OFFSET + data_bytes // BLOCK_BYTES * 4


class StoredObject:
    """An object in memory: empty, its head with one stretch of its data, or the whole object."""

    def __init__(self, name: str, index: int, data_bytes: int) -> None:
        """Begin as an object that was never written.

        Args:
            name: for errors.
            index: which object of the region it is.
            data_bytes: its data's size.
        """
        self._name = name
        self._index = index
        self._data_bytes = data_bytes
        self._head_bytes = head_bytes(data_bytes)
        self._loaded: tuple[memoryview, memoryview] | None = None
        self._whole: bytearray | None = None
        self._sums: Sums
        self._first = 0  # byte of the data that the stretch begins with
        self._data_address = 0

    def load(self, head: memoryview, stretch: memoryview, *, end: int, first: int = 0) -> None:
        """Load bytes of the store, without a copy.

        Args:
            head: the first `head_bytes`.
            stretch: data.
            end: the least end of the stretch, in bytes of the data.
            first: offset of the stretch in the data.

        Raises:
            ChecksumMismatch: it is no object of this library, not this object, or damaged.
        """
        packed, check, sums = head[: _HEADER.size], head[_HEADER.size : _SUMS_OFFSET], head[_SUMS_OFFSET:]
        if len(sums) != self._data_bytes // BLOCK_BYTES * 4 or bytes(packed[: len(_MAGIC)]) != _MAGIC:
            raise ChecksumMismatch(
                f"{self._name} was not written by this library; give the region another prefix"
            )
        _, block_bytes, index, data_bytes = _HEADER.unpack(packed)
        if (block_bytes, index, data_bytes) != (BLOCK_BYTES, self._index, self._data_bytes):
            raise ChecksumMismatch(
                f"{self._name} is object {index} with {data_bytes} bytes in blocks of {block_bytes}, and not object"
                f" {self._index} with {self._data_bytes} in blocks of {BLOCK_BYTES}; give the region the size_bytes and"
                " object_bytes that it was written with"
            )
        if check != _CHECK.pack(zlib.crc32(sums, zlib.crc32(packed))):
            raise ChecksumMismatch(f"{self._name}: its head is damaged; write the whole object anew")
        if first + len(stretch) < end:
            raise ChecksumMismatch(
                f"{self._name} ends after {first + len(stretch)} bytes of data, and not after {self._data_bytes}: it"
                " was truncated; write the whole object again"
            )
        self._first = first
        self._loaded = head, stretch
        self._sums = np.frombuffer(sums, "<u4")
        self._data_address = np.frombuffer(stretch, np.uint8).ctypes.data

    def write(self, extents: Extents, index: int, base: int) -> None:
        """Write pieces to it; either nothing or the whole object was loaded.

        Args:
            extents: of the region.
            index: the I/O whose pieces are meant.
            base: where in the region the object begins.

        Raises:
            ChecksumMismatch: the rest of a partially written block was changed.
        """
        self._own()
        start, end = extents.starts[index] - base, extents.ends[index] - base
        if not extents.whole[index]:
            partial = [block - base // BLOCK_BYTES for block in extents.partial_blocks(index)]
            self._refuse([block for block in partial if self._sums[block] and not self._fits(block)])
        pieces = slice(extents.bounds[index], extents.bounds[index + 1])
        targets = (extents.offsets[pieces] - base + self._data_address).astype(np.uint64)
        copy_ranges(
            targets, extents.addresses[pieces].astype(np.uint64), extents.lengths[pieces].astype(np.uint64)
        )
        self._sums[start // BLOCK_BYTES : end // BLOCK_BYTES] = self._sums_of(start, end)

    def read(self, extents: Extents, index: int, base: int, *, checksum: bool) -> None:
        """Read pieces into memory; see `write`.

        Raises:
            ChecksumMismatch: a block was changed, or never written.
        """
        if self._loaded is None:
            self._own()
        start, end = extents.starts[index] - base, extents.ends[index] - base
        if checksum:
            recorded = self._sums[start // BLOCK_BYTES : end // BLOCK_BYTES]
            bad = np.flatnonzero(recorded != self._sums_of(start, end))
            self._refuse((bad + start // BLOCK_BYTES).tolist())
        pieces = slice(extents.bounds[index], extents.bounds[index + 1])
        sources = (extents.offsets[pieces] - base - self._first + self._data_address).astype(np.uint64)
        copy_ranges(
            extents.addresses[pieces].astype(np.uint64), sources, extents.lengths[pieces].astype(np.uint64)
        )

    def sealed(self) -> bytearray:
        """Give the whole object with a new head, to be put."""
        whole = self._own()
        packed = _HEADER.pack(_MAGIC, BLOCK_BYTES, self._index, self._data_bytes)
        whole[:_SUMS_OFFSET] = packed + _CHECK.pack(zlib.crc32(self._sums.tobytes(), zlib.crc32(packed)))
        return whole

    def _own(self) -> bytearray:
        """Copy it into memory of its own, as a whole object."""
        if self._whole is None:
            size = self._head_bytes + self._data_bytes
            self._whole = bytearray().join(self._loaded) if self._loaded else bytearray(size)
            assert len(self._whole) == size, "only a whole object is written"
            self._sums = np.frombuffer(
                self._whole, "<u4", count=self._data_bytes // BLOCK_BYTES, offset=_SUMS_OFFSET
            )
            self._data_address = np.frombuffer(self._whole, np.uint8).ctypes.data + self._head_bytes
        return self._whole

    def _fits(self, block: int) -> bool:
        start = block * BLOCK_BYTES
        return bool(self._sums[block] == self._sums_of(start, start + BLOCK_BYTES)[0])

    def _sums_of(self, start: int, end: int) -> Sums:
        return sum_memory(self._data_address - self._first + start, end - start)

    def _refuse(self, blocks: list[int]) -> None:
        if blocks:
            what = (
                "does not fit its checksum: the store changed it"
                if self._sums[blocks[0]]
                else "was never written"
            )
            raise ChecksumMismatch(
                f"{self._name}: the block of {BLOCK_BYTES} bytes at {blocks[0] * BLOCK_BYTES} {what}"
                f" ({len(blocks)} such); write it anew"
            )
