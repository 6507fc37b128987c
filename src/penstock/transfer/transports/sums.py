"""Checksums that the owner of memory computes, so that the other side compares what arrived with what was there.

Transports whose initiator copies alone ask for them by `Link.request`, and answer them in `Transport.grant`.
"""

import asyncio
from collections.abc import Coroutine, Mapping
from concurrent.futures import Executor
from typing import Any

import msgspec
import numpy as np

from penstock.core.descriptors import Descriptors, Keys, MemoryKind, OffsetArray, RegionInfo, TransferOp
from penstock.core.errors import ChecksumMismatch, ProtocolError, TransferError, TransferRefused
from penstock.core.wire import Wire, encode, pack_hashes, unpack_hashes
from penstock.seams import Link, TransportHost
from penstock.transfer.regions.ranges import Sums, checksum_ranges
from penstock.transfer.regions.regions import addresses_of, distinct

RANGES_MAX = 1 << 16
"""Ranges in one request."""


class SumRanges(Wire, frozen=True):
    """Requests checksums of ranges; columns of little-endian uint64. The answer is one little-endian uint32 per range."""

    region_ids: bytes
    offsets: bytes
    lengths: bytes

    @classmethod
    def of(cls, ranges: Descriptors) -> "SumRanges":
        columns = (pack_hashes(column) for column in (ranges.region_ids, ranges.offsets, ranges.lengths))
        region_ids, offsets, lengths = columns
        return cls(region_ids=region_ids, offsets=offsets, lengths=lengths)

    @property
    def ranges(self) -> Descriptors:
        """The ranges.

        Raises:
            ProtocolError: the columns are invalid, or differ in length.
        """
        if len({len(self.region_ids), len(self.offsets), len(self.lengths)}) != 1 or len(self.offsets) % 8:
            raise ProtocolError(
                f"columns of {len(self.region_ids)}, {len(self.offsets)} and {len(self.lengths)} bytes; expected"
                " equal lengths, 8 bytes a range"
            )
        return Descriptors(
            unpack_hashes(self.region_ids), unpack_hashes(self.offsets), unpack_hashes(self.lengths)
        )


async def ask_sums(
    link: Link, transport: str, regions: Mapping[int, RegionInfo], ranges: Descriptors
) -> Sums:
    """Request checksums of ranges of the peer's memory.

    Returns:
        (n,) uint32.

    Raises:
        TransferRefused: a region was not given to read.
        TransferError: the peer does not answer with them.
    """
    parts = [np.empty(0, np.uint32)]
    for first in range(0, len(ranges), RANGES_MAX):
        part = slice(first, first + RANGES_MAX)
        some = Descriptors(ranges.region_ids[part], ranges.offsets[part], ranges.lengths[part])
        infos = (regions.get(region_id) for region_id in distinct(some.region_ids))
        keys = {info.region_id: info.key(TransferOp.READ) for info in infos if info is not None}
        answer = await link.request(transport, {TransferOp.READ: keys}, encode(SumRanges.of(some)))
        answer.close()
        if len(answer.payload) != 4 * len(some):
            raise TransferError(
                f"agent {link.peer}: {len(answer.payload)} bytes of checksums for {len(some)} ranges"
            )
        parts.append(np.frombuffer(answer.payload, "<u4"))
    return np.concatenate(parts)


async def answer_sums(
    host: TransportHost, link: Link, keys: Keys, payload: bytes, executor: Executor | None
) -> bytes:
    """Answer a peer's request, on a thread.

    Raises:
        TransferRefused: a key does not allow to read, a region is gone or in VRAM, or a range ends outside of it.
        ProtocolError: the payload is invalid, or has more than `RANGES_MAX` ranges.
    """
    try:
        ranges = msgspec.msgpack.decode(payload, type=SumRanges).ranges
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(
            f"agent {link.peer}: a message of {len(payload)} bytes for checksums: {error}"
        ) from error
    if len(ranges) > RANGES_MAX:
        raise ProtocolError(
            f"agent {link.peer}: {len(ranges)} ranges for checksums in one message, at most {RANGES_MAX} are allowed"
        )
    host.authorize(link.peer, keys.get(TransferOp.READ, {}), ranges, TransferOp.READ)
    regions = {region_id: host.region(region_id) for region_id in distinct(ranges.region_ids)}
    for region_id, region in regions.items():
        if region.kind is MemoryKind.VRAM:
            raise TransferRefused(f"region {region_id}: no checksums of vram")
    addresses = addresses_of(ranges, {region_id: region.address for region_id, region in regions.items()})
    lengths = np.ascontiguousarray(ranges.lengths)

    def work(_kept: object) -> Sums:
        return checksum_ranges(addresses, lengths)

    # the thread has the regions, so that their memory stays even if this task is cancelled
    sums = await asyncio.get_running_loop().run_in_executor(executor, work, regions)
    return sums.astype("<u4").tobytes()


async def compare_sums(
    here: Coroutine[Any, Any, Sums], there: Coroutine[Any, Any, Sums], lengths: OffsetArray, peer: str
) -> None:
    """Compute the checksums of the same ranges on both sides at the same time, and compare them.

    Raises:
        ChecksumMismatch: a range differs.
        PenstockError: what either of the two raised; the other one has ended by then.
    """
    try:
        async with asyncio.TaskGroup() as group:
            own, others = group.create_task(here), group.create_task(there)
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    expect_equal(own.result(), others.result(), lengths, peer)


def expect_equal(here: Sums, there: Sums, lengths: OffsetArray, peer: str) -> None:
    """Compare both sides' checksums of the same ranges.

    Raises:
        ChecksumMismatch: a range differs.
    """
    if not np.array_equal(here, there):
        index = int(np.argmax(here != there))
        raise ChecksumMismatch(
            f"range {index}, {int(lengths[index])} bytes: CRC-32C {int(here[index]):#x} here, {int(there[index]):#x} at"
            f" agent {peer}: it was changed on the way, or somebody writes there meanwhile"
        )
