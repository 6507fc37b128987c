"""Storage `object`: moves bytes between this agent's memory and regions in an object store (S3, GCS, Azure, a directory).

A region is cut into objects of 1 MiB or more, several blocks to an object, so that a store sees few large requests. An object
has the format of a pack (`storage.packs`) with the blocks that were written.
A write of a whole object puts it; a write of a part gets the object, changes it and puts it back.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from weakref import WeakValueDictionary

import numpy as np

from penstock.core.descriptors import (
    MAIN_MEMORY,
    MemoryKind,
    RangePairs,
    Region,
    RegionInfo,
    TransferCost,
    TransferOp,
)
from penstock.core.errors import (
    ChecksumMismatch,
    ConfigError,
    PenstockError,
    TransferRefused,
)
from penstock.seams import Move, TransportHost
from penstock.transfer.regions.checksum import crc32c
from penstock.transfer.regions.regions import distinct
from penstock.transfer.storage.bucket import Bucket
from penstock.transfer.storage.file import BLOCK_BYTES, check_sizes
from penstock.transfer.storage.io_threads import IoThreads
from penstock.transfer.storage.packs import (
    BLOCKS_MAX,
    RECORD,
    PackDamaged,
    Records,
    head_bytes,
    make_head,
    parse_records,
)
from penstock.transfer.storage.pieces import BlockPieces, pieces_by_block

OBJECT_BYTES_MIN = 1 << 20
_COST = TransferCost(start_s=2e-2, range_s=1e-5, bytes_per_s=2e8)
"""An object store in the same region: tens of milliseconds, and 0.1 to 1 GB/s for eight requests at once."""
_COPY_THREADS = 2


class ObjectRegion(Region):
    """Objects of a store that are read and written like memory and kept across restarts.

    Object i has the bytes from i * object_bytes on, under the key `prefix/0000000i`: a pack of its blocks with their checksums.
    Reading a block that was never written is an error. Several agents may read it; only one may write at a time, which
    nothing enforces.

    Attributes:
        store: a URL, or a store of obstore's.
        prefix: what the keys begin with.
        object_bytes: bytes of the blocks of one object.
        block_bytes: bytes that one checksum covers.
        options: for the store of a URL.
    """

    __slots__ = ("block_bytes", "object_bytes", "options", "prefix", "store")

    store: object
    prefix: str
    object_bytes: int
    block_bytes: int
    options: Mapping[str, str]

    def __init__(
        self,
        store: object,
        size_bytes: int,
        *,
        prefix: str = "",
        object_bytes: int = 4 << 20,
        block_bytes: int = BLOCK_BYTES,
        options: Mapping[str, str] | None = None,
        name: str = "",
    ) -> None:
        """Describe it; nothing is sent before the first transfer.

        Args:
            store: a URL: `s3://bucket/path`, `gs://`, `az://`, `file:///directory`, `memory://`; or a store of obstore's.
            size_bytes: a multiple of `block_bytes`.
            prefix: distinguishes this region from others in the same store.
            object_bytes: a multiple of `block_bytes`, at least 1 MiB; read a region with the value it was written with.
            block_bytes: a multiple of 4096; read a region with the value it was written with.
            options: keys, region, endpoint for a URL, as obstore names them; what is left out comes from the
                environment.
            name: as in `Region`.

        Raises:
            ConfigError: a size is no such multiple, or too small.
        """
        what = f"ObjectRegion {prefix or store}"
        check_sizes(what, size_bytes, block_bytes)
        if (
            object_bytes < OBJECT_BYTES_MIN
            or object_bytes % block_bytes
            or object_bytes > BLOCKS_MAX * block_bytes
        ):
            raise ConfigError(
                f"{what}: object_bytes must be a multiple of {block_bytes}, at least {OBJECT_BYTES_MIN} and at most"
                f" {BLOCKS_MAX * block_bytes}; got {object_bytes}"
            )
        Region.__init__(self, kind=MemoryKind.OBJECT, size_bytes=size_bytes, name=name)
        object.__setattr__(self, "store", store)
        object.__setattr__(self, "prefix", prefix.strip("/"))
        object.__setattr__(self, "object_bytes", object_bytes)
        object.__setattr__(self, "block_bytes", block_bytes)
        object.__setattr__(self, "options", dict(options or {}))


class ObjectStorage:
    """Gets and puts objects, with one bound on parallel requests for all transfers."""

    name = "object"
    kind = MemoryKind.OBJECT
    checksums = True

    def __init__(self, *, requests: int, request_timeout_s: float, retries: int) -> None:
        """Start nothing yet.

        Args:
            requests: parallel requests; each takes twice its object's size in memory.
            request_timeout_s: how long one request may take, with its retries.
            retries: of one request, after errors 5xx and lost connections.
        """
        self.requests = requests
        self.threads = IoThreads(_COPY_THREADS, 1, "transfer-object")
        self.slots = asyncio.Semaphore(requests)
        self.host: TransportHost | None = None
        self.regions: dict[int, _OpenRegion] = {}
        self._request_timeout_s = request_timeout_s
        self._retries = retries

    def start(self, host: TransportHost) -> None:
        self.host = host

    def register(self, region_id: int, region: Region) -> None:
        if not isinstance(region, ObjectRegion):
            raise TransferRefused("a region of kind object has to be an ObjectRegion")
        bucket = Bucket(
            region.store,
            region.options,
            request_timeout_s=self._request_timeout_s,
            retries=self._retries,
        )
        self.regions[region_id] = _OpenRegion(region, bucket)

    async def deregister(self, region_id: int) -> None:
        self.regions.pop(region_id, None)

    def lingering(self, region_id: int) -> Collection["asyncio.Future[None]"]:
        del region_id
        return ()

    def refusal(self, op: TransferOp, local: Sequence[Region], remote: Sequence[RegionInfo]) -> str | None:
        del op
        for region in local:
            if region.kind not in MAIN_MEMORY:
                return f"it moves between object stores and main memory, and the local side is {region.kind.value}"
        for info in remote:
            if info.region_id not in self.regions:
                return (
                    f"region {info.region_id}, {info.kind.value}, is no object store that this agent has open"
                )
        return None

    def cost(self, op: TransferOp) -> TransferCost:
        del op
        return _COST

    def prepare(self, op: TransferOp, pairs: RangePairs, *, checksum: bool) -> Move:
        return _ObjectMove(self, op, pairs, checksum=checksum)

    async def close(self) -> None:
        self.regions.clear()
        self.threads.close()


_Blocks = dict[int, tuple[memoryview, int]]
"""Blocks of an object by their number in the region: their bytes, fewer where the object is cut off, and their checksum."""


class _OpenRegion:
    """A region whose store is open."""

    def __init__(self, region: ObjectRegion, bucket: Bucket) -> None:
        self.bucket = bucket
        self.block_bytes = region.block_bytes
        self.object_blocks = region.object_bytes // region.block_bytes
        self._num_blocks = region.size_bytes // region.block_bytes
        self._prefix = region.prefix
        digest = hashlib.blake2b(f"ObjectRegion of {region.object_bytes}".encode(), digest_size=16)
        self._namespace = digest.digest()
        self._locks: WeakValueDictionary[int, asyncio.Lock] = WeakValueDictionary()

    def key(self, index: int) -> str:
        return f"{self._prefix}/{index:08d}".lstrip("/")

    def blocks_in(self, index: int) -> int:
        """Give how many blocks of the region an object has when all are written; the last object may have fewer."""
        return min(self.object_blocks, self._num_blocks - index * self.object_blocks)

    @asynccontextmanager
    async def alone(self, index: int) -> AsyncIterator[None]:
        """Exclude other transfers of this agent that change the object."""
        lock = self._locks.get(index)
        if lock is None:
            lock = self._locks[index] = asyncio.Lock()
        async with lock:
            yield

    async def get(self, index: int) -> _Blocks:
        """Get a whole object; no blocks if there is none.

        Raises:
            ChecksumMismatch: it is no object of this region.
            TransferError: the store failed.
        """
        count = self.blocks_in(index)
        raw = await self.bucket.get(self.key(index), 0, head_bytes(count) + count * self.block_bytes)
        if raw is None:
            return {}
        records = self._records(index, raw)
        return self._blocks(records, raw[head_bytes(len(records)) :])

    async def get_part(self, index: int, first: int, last: int) -> _Blocks:
        """Get the head of an object, and its blocks from number `first` to `last`; errors as of `get`."""
        key = self.key(index)
        raw = await self.bucket.get(key, 0, head_bytes(self.blocks_in(index)))
        if raw is None:
            return {}
        records = self._records(index, raw)
        numbers = records["hash"][:, 0]
        rows = np.flatnonzero((numbers >= first) & (numbers <= last))
        if not len(rows):
            return {}
        begin = head_bytes(len(records)) + int(rows[0]) * self.block_bytes
        data = await self.bucket.get(key, begin, begin + len(rows) * self.block_bytes)
        return self._blocks(records[rows], data or memoryview(b""))

    def block(self, index: int, blocks: _Blocks, block: int, *, checksum: bool = True) -> memoryview:
        """Give the bytes of a block of an object; without `checksum` those of a block that was never written are zeros.

        Raises:
            ChecksumMismatch: they do not fit their checksum, or the block was never written, or is cut off.
        """
        size = self.block_bytes
        view, expected = blocks.get(block, (None, 0))
        if view is None:
            if not checksum:
                return memoryview(bytes(size))
            what = "was never written"
        elif len(view) < size:
            what = "is cut off: the store has only a part of the object"
        elif checksum and crc32c(np.frombuffer(view, np.uint8)) != expected:
            what = "does not fit its checksum: the store changed it"
        else:
            return view
        at = (block - index * self.object_blocks) * size
        raise ChecksumMismatch(
            f"{self._name(index)}: the block of {size} bytes at {at} {what}; write it anew"
        )

    def changed(self, index: int, blocks: _Blocks, pieces: Sequence[BlockPieces]) -> bytearray:
        """Make an object of `blocks` with new pieces; a block that is written in part for the first time has zeros elsewhere.

        Raises:
            ChecksumMismatch: the rest of a block that is written in part does not fit its checksum.
        """
        size = self.block_bytes
        kept = {block: both for block, both in blocks.items() if len(both[0]) == size}
        for each in pieces:
            new = np.zeros(size, np.uint8)
            if not each.covers(size) and each.block in blocks:
                new[:] = np.frombuffer(self.block(index, blocks, each.block), np.uint8)
            each.gather(new.ctypes.data)
            kept[each.block] = new.data, crc32c(new)
        order = sorted(kept)
        records = np.zeros(len(order), RECORD)
        records["hash"][:, 0], records["length"] = order, size
        records["data_sum"] = [kept[block][1] for block in order]
        _, head = make_head(self._namespace, size, records)
        return bytearray().join([head, *(kept[block][0] for block in order)])

    def _records(self, index: int, raw: memoryview) -> Records:
        fix = "write the whole object anew, give the region the sizes that it was written with, or give it another prefix"
        try:
            records = parse_records(raw, namespace=self._namespace, block_bytes=self.block_bytes)
        except PackDamaged as error:
            raise ChecksumMismatch(f"{self._name(index)}: {error}; {fix}") from error
        if (records["hash"][:, 0] // self.object_blocks != index).any():
            raise ChecksumMismatch(f"{self._name(index)} has blocks of another object; {fix}")
        return records

    def _blocks(self, records: Records, data: memoryview) -> _Blocks:
        size = self.block_bytes
        return {
            block: (data[row * size : (row + 1) * size], data_sum)
            for row, (block, data_sum) in enumerate(
                zip(records["hash"][:, 0].tolist(), records["data_sum"].tolist(), strict=True)
            )
        }

    def _name(self, index: int) -> str:
        return f"{self.bucket.name}/{self.key(index)}"


@dataclass(frozen=True, slots=True, eq=False)
class _Touched:
    """An object that a list of ranges touches: object `index` of a region, with the pieces of its blocks."""

    region_id: int
    index: int
    pieces: Sequence[BlockPieces]


def _object_of(region: _OpenRegion, pieces: BlockPieces) -> int:
    return pieces.block // region.object_blocks


class _ObjectMove:
    """A list of ranges with the objects that it touches."""

    def __init__(self, own: ObjectStorage, op: TransferOp, pairs: RangePairs, *, checksum: bool) -> None:
        host = own.host
        assert host is not None, "prepared before the start"
        self._own = own
        self._op = op
        self._checksum = checksum
        addresses = {i: host.region(i).address for i in distinct(pairs.local.region_ids)}
        self._touched: list[_Touched] = []
        for region_id in distinct(pairs.remote.region_ids):
            region = own.regions[region_id]
            pieces = pieces_by_block(pairs, region_id, region.block_bytes, addresses)
            self._touched += [
                _Touched(region_id, index, tuple(group))
                for index, group in groupby(pieces, partial(_object_of, region))
            ]

    def run_now(self) -> bool:
        return False

    async def run(self) -> None:
        try:
            regions = {touched.region_id: self._own.regions[touched.region_id] for touched in self._touched}
        except KeyError as error:
            raise TransferRefused(f"region {error.args[0]} was deregistered meanwhile") from error
        failures: list[PenstockError] = []
        todo = iter(self._touched)

        async def work() -> None:
            for touched in todo:
                if failures:
                    return
                region = regions[touched.region_id]
                try:
                    if self._op is TransferOp.READ:
                        await self._read(region, touched)
                    else:
                        await self._write(region, touched)
                except PenstockError as error:
                    failures.append(error)

        async with asyncio.TaskGroup() as workers:
            for _ in range(min(self._own.requests, len(self._touched))):
                workers.create_task(work())
        if failures:
            raise failures[0]

    async def _read(self, region: _OpenRegion, touched: _Touched) -> None:
        index, first, last = touched.index, touched.pieces[0].block, touched.pieces[-1].block

        def scatter(blocks: _Blocks) -> None:
            for pieces in touched.pieces:
                view = region.block(index, blocks, pieces.block, checksum=self._checksum)
                pieces.scatter(np.frombuffer(view, np.uint8).ctypes.data)

        async with self._own.slots:
            if last - first + 1 <= region.blocks_in(index) // 2:
                try:
                    await self._on_thread(scatter, await region.get_part(index, first, last))
                except ChecksumMismatch:
                    pass  # perhaps the object was put anew between its head and its data: look at it as a whole
                else:
                    return
            await self._on_thread(scatter, await region.get(index))

    async def _write(self, region: _OpenRegion, touched: _Touched) -> None:
        index, pieces = touched.index, touched.pieces
        is_whole = len(pieces) == region.blocks_in(index) and all(
            each.covers(region.block_bytes) for each in pieces
        )
        made: list[bytearray] = []

        async with region.alone(index), self._own.slots:
            blocks = {} if is_whole else await region.get(index)
            await self._on_thread(lambda known: made.append(region.changed(index, known, pieces)), blocks)
            await region.bucket.put(region.key(index), made[0])

    async def _on_thread(self, do: Callable[[_Blocks], None], blocks: _Blocks) -> None:
        threads = self._own.threads
        await threads.finish(threads.start(lambda _index, _bounce: do(blocks), 1))
