"""Storage `object`: moves bytes between this agent's memory and regions in an object store (S3, GCS, Azure, a directory).

A region is cut into objects of 1 MiB or more, several blocks to an object, so that a store sees few large requests.
A write of a whole object puts it; a write of a part gets the object, changes it and puts it back.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
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
from penstock.transfer.regions.regions import addresses_of, distinct
from penstock.transfer.storage.block_sums import BLOCK_BYTES
from penstock.transfer.storage.bucket import Bucket
from penstock.transfer.storage.extents import Extents
from penstock.transfer.storage.io_threads import IoThreads
from penstock.transfer.storage.stored_object import StoredObject, head_bytes

OBJECT_BYTES_MIN = 1 << 20
_COST = TransferCost(start_s=2e-2, range_s=1e-5, bytes_per_s=2e8)
"""An object store in the same region: tens of milliseconds, and 0.1 to 1 GB/s for eight requests at once."""
_COPY_THREADS = 2


class ObjectRegion(Region):
    """Objects of a store that are read and written like memory and kept across restarts.

    Object i has the bytes from i * object_bytes on, under the key `prefix/0000000i`, and the checksums of its blocks.
    Reading a block that was never written is an error. Several agents may read it; only one may write at a time, which
    nothing enforces.

    Attributes:
        store: a URL, or a store of obstore's.
        prefix: what the keys begin with.
        object_bytes: bytes of one object.
        options: for the store of a URL.
    """

    __slots__ = ("object_bytes", "options", "prefix", "store")

    store: object
    prefix: str
    object_bytes: int
    options: Mapping[str, str]

    def __init__(
        self,
        store: object,
        size_bytes: int,
        *,
        prefix: str = "",
        object_bytes: int = 4 << 20,
        options: Mapping[str, str] | None = None,
        name: str = "",
    ) -> None:
        """Describe it; nothing is sent before the first transfer.

        Args:
            store: a URL: `s3://bucket/path`, `gs://`, `az://`, `file:///directory`, `memory://`; or a store of obstore's.
            size_bytes: a multiple of 4096.
            prefix: distinguishes this region from others in the same store.
            object_bytes: a multiple of 4096, at least 1 MiB; read a region with the value it was written with.
            options: keys, region, endpoint for a URL, as obstore names them; what is left out comes from the
                environment.
            name: as in `Region`.

        Raises:
            ConfigError: a size is no such multiple, or too small.
        """
        what = f"ObjectRegion {prefix or store}"
        if size_bytes < BLOCK_BYTES or size_bytes % BLOCK_BYTES:
            raise ConfigError(
                f"{what}: size_bytes must be a multiple of {BLOCK_BYTES}, and not 0; got {size_bytes}"
            )
        if object_bytes < OBJECT_BYTES_MIN or object_bytes % BLOCK_BYTES:
            raise ConfigError(
                f"{what}: object_bytes must be a multiple of {BLOCK_BYTES}, and at least {OBJECT_BYTES_MIN}; got"
                f" {object_bytes}"
            )
        Region.__init__(self, kind=MemoryKind.OBJECT, size_bytes=size_bytes, name=name)
        object.__setattr__(self, "store", store)
        object.__setattr__(self, "prefix", prefix.strip("/"))
        object.__setattr__(self, "object_bytes", object_bytes)
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
        self.threads = IoThreads(_COPY_THREADS, BLOCK_BYTES, "transfer-object")
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


class _OpenRegion:
    """A region whose store is open."""

    def __init__(self, region: ObjectRegion, bucket: Bucket) -> None:
        self.bucket = bucket
        self.object_bytes = region.object_bytes
        self._size_bytes = region.size_bytes
        self._prefix = region.prefix
        self._locks: WeakValueDictionary[int, asyncio.Lock] = WeakValueDictionary()

    def key(self, index: int) -> str:
        return f"{self._prefix}/{index:08d}".lstrip("/")

    def data_bytes(self, index: int) -> int:
        """Give how many bytes of the region an object has; the last one may have fewer."""
        return min(self.object_bytes, self._size_bytes - index * self.object_bytes)

    def blank(self, index: int) -> StoredObject:
        return StoredObject(f"{self.bucket.name}/{self.key(index)}", index, self.data_bytes(index))

    @asynccontextmanager
    async def alone(self, index: int) -> AsyncIterator[None]:
        """Exclude other transfers of this agent that change the object."""
        lock = self._locks.get(index)
        if lock is None:
            lock = self._locks[index] = asyncio.Lock()
        async with lock:
            yield


@dataclass(frozen=True, slots=True, eq=False)
class _Touched:
    """An object that a list touches: in `extents`, from `first` to before `end`."""

    region_id: int
    index: int
    extents: Extents
    first: int
    end: int


class _ObjectMove:
    """A list of ranges with the objects that it touches."""

    def __init__(self, own: ObjectStorage, op: TransferOp, pairs: RangePairs, *, checksum: bool) -> None:
        self._own = own
        self._op = op
        self._checksum = checksum
        self._touched = [
            touched
            for region_id in distinct(pairs.remote.region_ids)
            for touched in self._objects_of(region_id, pairs)
        ]

    def run_now(self) -> bool:
        return False

    async def run(self) -> None:
        regions = self._regions()
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

    def _objects_of(self, region_id: int, pairs: RangePairs) -> list[_Touched]:
        host = self._own.host
        assert host is not None, "prepared before the start"
        object_bytes = self._own.regions[region_id].object_bytes
        mine = pairs.remote.region_ids == np.uint64(region_id)
        address_by_region = {i: host.region(i).address for i in distinct(pairs.local.region_ids)}
        extents = Extents.plan(
            pairs.remote.region_ids[mine],
            pairs.remote.offsets[mine],
            addresses_of(pairs.local, address_by_region)[mine],
            pairs.remote.lengths[mine],
            io_bytes=object_bytes,
        )
        indices = [start // object_bytes for start in extents.starts]
        firsts = [i for i, index in enumerate(indices) if i == 0 or index != indices[i - 1]]
        ends = [*firsts[1:], len(indices)]
        return [
            _Touched(region_id, indices[first], extents, first, end)
            for first, end in zip(firsts, ends, strict=True)
        ]

    async def _read(self, region: _OpenRegion, touched: _Touched) -> None:
        base = touched.index * region.object_bytes
        data_bytes = region.data_bytes(touched.index)
        start = touched.extents.starts[touched.first] - base
        end = touched.extents.ends[touched.end - 1] - base

        def scatter(found: StoredObject) -> None:
            for index in range(touched.first, touched.end):
                found.read(touched.extents, index, base, checksum=self._checksum)

        async with self._own.slots:
            if end - start <= data_bytes // 2:
                try:
                    await self._on_thread(scatter, await self._get_part(region, touched.index, start, end))
                except ChecksumMismatch:
                    pass  # perhaps the object was put anew between its head and its data: look at it as a whole
                else:
                    return
            await self._on_thread(scatter, await self._get(region, touched.index, end))

    async def _write(self, region: _OpenRegion, touched: _Touched) -> None:
        base = touched.index * region.object_bytes
        extents, first = touched.extents, touched.first
        covers_all = extents.whole[first] and extents.ends[first] - extents.starts[
            first
        ] == region.data_bytes(touched.index)

        def gather(stored: StoredObject) -> None:
            for index in range(first, touched.end):
                stored.write(extents, index, base)

        async with region.alone(touched.index), self._own.slots:
            if covers_all:
                stored = region.blank(touched.index)
            else:
                stored = await self._get(region, touched.index, region.data_bytes(touched.index))
            await self._on_thread(gather, stored)
            await region.bucket.put(region.key(touched.index), stored.sealed())

    async def _get(self, region: _OpenRegion, index: int, end: int) -> StoredObject:
        """Get a whole object, of which at least the data before `end` has to be there."""
        stored = region.blank(index)
        head_size = head_bytes(region.data_bytes(index))
        raw = await region.bucket.get(region.key(index), 0, head_size + region.data_bytes(index))
        if raw is not None:
            stored.load(raw[:head_size], raw[head_size:], end=end)
        return stored

    async def _get_part(self, region: _OpenRegion, index: int, start: int, end: int) -> StoredObject:
        """Get the head of an object, and its data from `start` to `end`."""
        stored = region.blank(index)
        head_size = head_bytes(region.data_bytes(index))
        key = region.key(index)
        head = await region.bucket.get(key, 0, head_size)
        if head is not None:
            stretch = await region.bucket.get(key, head_size + start, head_size + end)
            stored.load(head, stretch or memoryview(b""), first=start, end=end)
        return stored

    async def _on_thread(self, do: Callable[[StoredObject], None], stored: StoredObject) -> None:
        threads = self._own.threads
        await threads.finish(threads.start(lambda _index, _bounce: do(stored), 1))

    def _regions(self) -> dict[int, _OpenRegion]:
        try:
            return {touched.region_id: self._own.regions[touched.region_id] for touched in self._touched}
        except KeyError as error:
            raise TransferRefused(f"region {error.args[0]} was deregistered meanwhile") from error
