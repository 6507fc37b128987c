"""The format of a pack, an object of several blocks: a head that says which blocks are inside, then the blocks one after the other.

The head is 48 bytes (magic, version, number of blocks, namespace, bytes of a block, checksum of the whole head) and a record of
32 bytes for each block. A pack's name is the digest of its head, so a head that does not fit its name is not trusted.
"""

import hashlib
import re
import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import TransferError
from penstock.core.wire import HashArray
from penstock.transfer.regions.checksum import crc32c

RECORD = np.dtype(
    [
        ("hash", "<u8", 2),
        ("parent", "<u8"),  # low64 of the block before; 0: none
        ("length", "<u4"),  # bytes of data
        ("data_sum", "<u4"),  # CRC-32C of the data
    ]
)
Records = NDArray[np.void]

BLOCKS_MAX = 4096
"""In one pack."""
NAME = re.compile(r"[0-9a-f]{32}\Z")
_VERSION = 1
_MAGIC = b"pstkpack"
_HEAD = struct.Struct("<8sII16sQI4x")
_SUM_AT = 40


class PackDamaged(TransferError):  # noqa: N818 - as ChecksumMismatch
    """An object is no pack of this namespace, or its head has other bytes than were written."""


@dataclass(frozen=True, slots=True, eq=False)
class Pack:
    """What the head of a pack says.

    Attributes:
        name: of the object, without its prefix.
        records: (n,) of its blocks.
        offsets: (n,) int64, where each block begins in the object.
        size_bytes: of the object.
    """

    name: str
    records: Records
    offsets: NDArray[np.int64]
    size_bytes: int

    @property
    def hashes(self) -> HashArray:
        """(n, 2) uint64 of its blocks."""
        return np.ascontiguousarray(self.records["hash"])


def head_bytes(num_blocks: int) -> int:
    """Compute the length of a head in bytes."""
    return _HEAD.size + num_blocks * RECORD.itemsize


def make_head(namespace: bytes, block_bytes: int, records: Records) -> tuple[str, bytes]:
    """Make the head of a new pack; returns (name, head).

    Args:
        namespace: its digest.
        block_bytes: of each block.
        records: (n,) of its blocks, n at most `BLOCKS_MAX`.
    """
    assert 1 <= len(records) <= BLOCKS_MAX, len(records)
    head = bytearray(_HEAD.pack(_MAGIC, _VERSION, len(records), namespace, block_bytes, 0))
    head += records.tobytes()
    struct.pack_into("<I", head, _SUM_AT, crc32c(np.frombuffer(head, np.uint8)))
    return _digest(bytes(head)), bytes(head)


def count_blocks(data: bytes | memoryview) -> int:
    """Read from the first bytes of an object how many blocks it has.

    Raises:
        PackDamaged: it is no pack, or of another version.
    """
    if len(data) < _HEAD.size:
        raise PackDamaged(f"a pack has at least {_HEAD.size} bytes, and not {len(data)}")
    magic, version, count, _, _, _ = _HEAD.unpack_from(data)
    if magic != _MAGIC or version != _VERSION:
        raise PackDamaged(f"no pack of version {_VERSION}: it begins with {bytes(data[:12]).hex()}")
    if not 1 <= count <= BLOCKS_MAX:
        raise PackDamaged(f"a pack has 1 to {BLOCKS_MAX} blocks, and not {count}")
    return int(count)


def parse_head(
    name: str, data: bytes | memoryview, size_bytes: int, *, namespace: bytes, block_bytes: int
) -> Pack:
    """Read the head of a pack and check all of it.

    Args:
        name: of the object, without its prefix.
        data: its first bytes, at least the head.
        size_bytes: of the object.
        namespace: digest that its blocks must have.
        block_bytes: that each block must have.

    Raises:
        PackDamaged: the head is not one that was written under this name, or the object has another size.
    """
    count = count_blocks(data)
    head = bytes(data[: head_bytes(count)])
    if len(head) == head_bytes(count) and _digest(head) != name:
        raise PackDamaged(f"pack {name}: its head has digest {_digest(head)}")
    records = parse_records(data, namespace=namespace, block_bytes=block_bytes)
    offsets = head_bytes(count) + np.arange(count, dtype=np.int64) * block_bytes
    if size_bytes != int(offsets[-1]) + block_bytes:
        raise PackDamaged(f"pack {name} has {size_bytes} bytes, and not {int(offsets[-1]) + block_bytes}")
    return Pack(name, records, offsets, size_bytes)


def parse_records(data: bytes | memoryview, *, namespace: bytes, block_bytes: int) -> Records:
    """Read the (n,) records of a head and check all of it but the name; arguments as in `parse_head`.

    Raises:
        PackDamaged: it is not a head of this namespace and block size, or is damaged.
    """
    count = count_blocks(data)
    if len(data) < head_bytes(count):
        raise PackDamaged(f"the head has {head_bytes(count)} bytes, but only {len(data)} are there")
    head = bytearray(data[: head_bytes(count)])
    _, _, _, found_namespace, found_bytes, found_sum = _HEAD.unpack_from(head)
    struct.pack_into("<I", head, _SUM_AT, 0)
    if crc32c(np.frombuffer(head, np.uint8)) != found_sum:
        raise PackDamaged("the head does not fit its checksum")
    if found_namespace != namespace:
        raise PackDamaged(f"the pack is of namespace {found_namespace.hex()}, and not {namespace.hex()}")
    records = np.frombuffer(bytes(head), RECORD, count, _HEAD.size)
    if found_bytes != block_bytes or (records["length"] != block_bytes).any():
        raise PackDamaged(f"the pack has blocks of {found_bytes} bytes, and not {block_bytes}")
    return records


def _digest(head: bytes) -> str:
    return hashlib.blake2b(head, digest_size=16).hexdigest()
