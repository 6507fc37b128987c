"""`ObjectPacks`: KV blocks in an object store, several to an object, shared by many writers.

Packs are immutable and named by their content, so writers need no locks: two writers that put the same pack put the same bytes.
A pack may be deleted at any time; its blocks are then missing. A block is only served if its bytes match the checksum in the
verified head of its pack.
"""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import numpy as np

from penstock.core.clock import wall_time_s
from penstock.core.errors import ConfigError, DeadlineExceeded
from penstock.core.log import get_logger
from penstock.core.types.events import KvEvent
from penstock.core.wire import HashArray
from penstock.kv.buffers import Buffers, Bytes, block_views
from penstock.kv.namespace import Namespace
from penstock.kv.object.catalogue import PackCatalogue
from penstock.kv.object.config import PacksConfig
from penstock.kv.object.counts import PackCounts
from penstock.kv.object.index import Entry, PackIndex
from penstock.kv.object.writer import PackWriter
from penstock.transfer.regions.checksum import crc32c
from penstock.transfer.storage.bucket import Bucket
from penstock.transfer.storage.io_threads import Bounce, IoThreads
from penstock.transfer.storage.packs import BLOCKS_MAX, RECORD, Pack

_CLOSE_S = 2.0
"""How long the context's end waits for packs that are being put."""
_FIRST_AGAIN_S = 1.0
"""A first list that fails is tried again after this, then after twice as long, up to `refresh_s`."""
_THREADS = 2  # copy and verify
READ_BYTES = 8 << 20  # of blocks, by one request


@dataclass(slots=True, eq=False)
class _Load:
    """A load under way.

    Attributes:
        hashes: (n, 2) of the blocks.
        entries: where they are.
        views: their targets.
        bad: indexes of blocks that are damaged or whose pack is gone.
    """

    hashes: HashArray
    entries: list[Entry]
    views: list[Bytes]
    bad: list[int] = field(default_factory=list)


class ObjectPacks:
    """Packs of one namespace in an object store; an async context manager. One task owns it.

    Attributes:
        counts: what happened to blocks and packs.
    """

    def __init__(
        self,
        store: object,
        block_bytes: int,
        namespace: Namespace,
        config: PacksConfig | None = None,
        *,
        prefix: str = "kv",
        options: Mapping[str, str] | None = None,
    ) -> None:
        """Describe it; nothing is sent before it is entered.

        Args:
            store: a URL (`s3://bucket/path`, `gs://`, `az://`, `file:///directory`), or an obstore store.
            block_bytes: of one block.
            namespace: of the blocks.
            config: sizes, times and bounds.
            prefix: of all keys; the namespace's digest follows. Only packs may be under it.
            options: keys, region, endpoint for a URL, as obstore names them.

        Raises:
            ConfigError: a size is wrong, or there is no prefix.
            TransferRefused: obstore is not installed, or the URL or an option is wrong.
        """
        self._config = config or PacksConfig()
        prefix = prefix.strip("/")
        if block_bytes < 1 or not prefix:
            raise ConfigError(
                f"packs in {store}: block_bytes must be >= 1 and prefix not empty; got {block_bytes} and {prefix!r}"
            )
        self.block_bytes = block_bytes
        self.counts = PackCounts()
        self._bucket = Bucket(
            store,
            options or {},
            request_timeout_s=self._config.request_timeout_s,
            retries=self._config.retries,
        )
        self._index = PackIndex(namespace.block_size, self._config.blocks_max)
        self._catalogue = PackCatalogue(
            self._bucket,
            prefix,
            namespace.digest,
            block_bytes,
            config=self._config,
            index=self._index,
            counts=self.counts,
        )
        self._folder = self._catalogue.folder
        self._loads = asyncio.Semaphore(self._config.requests)
        self._writer = PackWriter(
            self._bucket,
            self._folder,
            namespace.digest,
            block_bytes=block_bytes,
            pack_blocks=min(max(self._config.pack_bytes // block_bytes, 1), BLOCKS_MAX),
            gather_s=self._config.gather_s,
            requests=asyncio.Semaphore(self._config.requests),
            may_replace=lambda name: self._index.is_damaged(name) or name in self._catalogue.refused,
            on_put=self._take_in,
        )
        self._threads = IoThreads(_THREADS, 1, "kv-object")
        self._storing: set[bytes] = set()
        self._was_listed = self._fails = False
        self._on_change: Callable[[], None] = lambda: None
        self._on_failed: Callable[[Exception], None] = lambda _: None
        self._stack = AsyncExitStack()
        self._tasks: asyncio.TaskGroup | None = None
        self._running: asyncio.Task[None] | None = None
        self._over = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._tasks = await self._stack.enter_async_context(asyncio.TaskGroup())
        self._keeping = self._tasks.create_task(self._keep_fresh(), name="refresh packs")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Put the packs that wait; after `_CLOSE_S` they are abandoned."""
        assert self._tasks is not None
        self._keeping.cancel()
        try:
            await self._writer.close(self._tasks, _CLOSE_S)
        finally:
            self._threads.close()
            self._tasks = None
            await self._stack.__aexit__(None, None, None)  # no task fails: the body's error stays as it is

    def start(self, on_change: Callable[[], None], on_failed: Callable[[Exception], None]) -> None:
        """Enter it in a task of its own, until `close`.

        Args:
            on_change: called when `take_events` may return more.
            on_failed: called if the store cannot be listed at the start; it is tried again.
        """
        self._on_change, self._on_failed = on_change, on_failed
        self._running = asyncio.get_running_loop().create_task(self._run(), name="object packs")

    async def close(self) -> None:
        """Put what waits for `_CLOSE_S` at most, and leave it. Safe twice."""
        self._over.set()
        if self._running is None:
            self._threads.close()
        else:
            await self._running

    def clear(self) -> None:
        """Forget all packs until the next list. They stay in the store, for other workers and for this one."""
        self._index.clear()

    def take_events(self) -> tuple[KvEvent, ...]:
        """Return the KV events since the last call; the packs of other writers count too."""
        events = self._index.take_events()
        if self._index.has_events:
            self._on_change()
        return events

    def newest(self, count: int) -> HashArray:
        """Give the hashes of up to `count` blocks in the packs that were found last: (n, 2) uint64, empty without packs."""
        return self._index.newest(count)

    @property
    def num_cached(self) -> int:
        """Blocks that can be loaded."""
        return len(self._index)

    @property
    def num_mismatched(self) -> int:
        """Blocks that had other bytes than were written, since it was made."""
        return self.counts.mismatched

    @property
    def storing_room(self) -> int:
        """Blocks that `store` would take now."""
        return max(max(self._config.storing_max_bytes // self.block_bytes, 1) - len(self._storing), 0)

    def probe(self) -> float | None:
        """Return None: a request costs money, and the first packs that a list names are a sample."""
        return None

    def locate(self, block_hashes: HashArray) -> int:
        """Count the leading blocks that are held, as the index knows; nothing is sent.

        Args:
            block_hashes: (n, 2) uint64.
        """
        return self._index.locate(block_hashes)

    async def load(self, block_hashes: HashArray, targets: Buffers, *, timeout_s: float | None = None) -> int:
        """Load leading blocks and verify them. A block whose bytes do not match their checksum is dropped.

        After an error, a cancellation or a deadline nothing more is written to the targets.

        Args:
            block_hashes: (n, 2) uint64.
            targets: n buffers of `block_bytes`; those after the blocks that were loaded may have any content.
            timeout_s: deadline, None for none.

        Returns:
            how many leading blocks were loaded.

        Raises:
            TransferError: the object store failed.
            DeadlineExceeded: it did not answer in time.
            ValueError: a target has another size, or is read-only.
        """
        views = block_views(targets, self.block_bytes, writable=True)
        hashes = np.ascontiguousarray(block_hashes[: len(views)], "<u8")
        entries = self._index.find(hashes)
        load = _Load(hashes, entries, views)
        try:
            async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as group:
                for steps in self._runs(entries):
                    group.create_task(self._load_run(load, steps))
        except TimeoutError as error:
            raise DeadlineExceeded(f"{self._bucket.name}: no answer within {timeout_s} s") from error
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        loaded = min(load.bad, default=len(entries))
        self.counts.loaded += loaded
        return loaded

    async def store(
        self,
        block_hashes: HashArray,
        sources: Buffers,
        *,
        parent: int | None = None,
        timeout_s: float | None = None,
        on_copied: Callable[[], None] | None = None,
    ) -> int:
        """Store the blocks that are not held, in as few packs as `pack_bytes` allows.

        Args:
            block_hashes: (n, 2) uint64, each block the child of the one before it.
            sources: n buffers of `block_bytes`; they are copied, and may change once this returns or raises.
            parent: low64 of the first block's parent, None at the root.
            timeout_s: deadline, None for none.
            on_copied: called once the sources were copied, before anything is put.

        Returns:
            how many leading blocks are held now.

        Raises:
            TransferError: the object store failed.
            DeadlineExceeded: it did not answer in time; what was being put may be held later.
            ValueError: a source has another size.
        """
        assert self._tasks is not None, "enter it first"
        loop = asyncio.get_running_loop()
        deadline_s = None if timeout_s is None else loop.time() + timeout_s
        views = block_views(sources, self.block_bytes, writable=False)
        hashes = np.ascontiguousarray(block_hashes[: len(views)], "<u8")
        new = self._choose(hashes)
        records = np.zeros(len(new), RECORD)
        records["hash"], records["length"] = hashes[new], self.block_bytes
        records["parent"] = np.concatenate([[np.uint64(parent or 0)], hashes[:-1, 0]])[new] if new else 0
        keys = {row.tobytes() for row in hashes[new]}
        self._storing |= keys
        try:
            blocks = await self._copy([views[n] for n in new], records)
        except BaseException:
            self._storing -= keys
            raise
        if on_copied is not None:
            on_copied()
        waits = self._writer.add(records, blocks, self._tasks)
        if waits:
            whole = asyncio.gather(*waits, return_exceptions=True)
            whole.add_done_callback(lambda _: self._storing.difference_update(keys))
            left_s = None if deadline_s is None else max(deadline_s - loop.time(), 0)
            _, late = await asyncio.wait(waits, timeout=left_s)
            if late:
                raise DeadlineExceeded(f"{self._bucket.name}: no answer within {timeout_s} s")
            for wait in waits:
                wait.result()
        return self.locate(hashes)

    async def refresh(self) -> None:
        """List the packs of this namespace: add those of other writers to the index, and remove deleted ones.

        Raises:
            TransferError: the object store failed.
        """
        await self._catalogue.refresh()

    async def collect(self) -> int:
        """Delete packs of all namespaces under the prefix that are too old or beyond the budget, the oldest first.

        Several writers may collect at once, since all choose the same packs. Age is this host's time less the store's date.

        Returns:
            how many packs were deleted.

        Raises:
            TransferError: the object store failed.
        """
        return await self._catalogue.collect()

    def check(self) -> None:
        """Raise AssertionError if the index is inconsistent."""
        self._index.check()

    def _take_in(self, pack: Pack) -> None:
        self._catalogue.refused.discard(pack.name)
        self._index.add(pack, wall_time_s())
        self.counts.stored += len(pack.records)
        self._on_change()

    def _choose(self, hashes: HashArray) -> list[int]:
        """Choose the blocks to store: neither held nor being stored, at most as many as `storing_max_bytes` allows."""
        keys = [row.tobytes() for row in hashes]
        new = [
            n
            for n, key in enumerate(keys)
            if key not in self._storing and not self._index.locate(hashes[n : n + 1]) and key not in keys[:n]
        ]
        self.counts.refused += len(new[self.storing_room :])
        return new[: self.storing_room]

    async def _copy(self, views: list[Bytes], records: np.ndarray) -> list[Bytes]:
        """Copy blocks and compute their checksums. A cancellation is raised only when no thread reads the blocks any more."""
        copies = [np.empty(self.block_bytes, np.uint8) for _ in views]

        def do(step: int, _bounce: Bounce) -> None:
            copies[step][:] = views[step]
            records["data_sum"][step] = crc32c(copies[step])

        await self._threads.finish(self._threads.start(do, len(views)))
        return copies

    def _runs(self, entries: list[Entry]) -> list[list[int]]:
        """Group the blocks of a load by request: neighbours in one pack, at most `READ_BYTES`."""
        size = max(READ_BYTES // self.block_bytes, 1)
        runs: list[list[int]] = []
        for step, entry in enumerate(entries):
            before = entries[step - 1]
            follows = entry.name == before.name and entry.offset == before.offset + self.block_bytes
            if step and follows and len(runs[-1]) < size:
                runs[-1].append(step)
            else:
                runs.append([step])
        return runs

    async def _load_run(self, load: _Load, steps: list[int]) -> None:
        """Get a run of blocks, verify them and write them to their targets."""
        name, start = load.entries[steps[0]].name, load.entries[steps[0]].offset
        key, size = f"{self._folder}/{name}", self.block_bytes
        async with self._loads:
            if load.bad and min(load.bad) < steps[0]:
                return  # they would not be leading blocks
            found = await self._bucket.get(key, start, start + len(steps) * size)
        if found is None:
            self.counts.packs_gone += name in self._index
            self._index.remove([name])
            load.bad += steps
            return
        damaged: list[int] = []

        def do(n: int, _bounce: Bounce) -> None:
            data = np.frombuffer(found[n * size : (n + 1) * size], np.uint8)
            if data.size == size and crc32c(data) == load.entries[steps[n]].data_sum:
                load.views[steps[n]][:] = data
            else:
                damaged.append(steps[n])

        await self._threads.finish(self._threads.start(do, len(steps)))
        if not damaged:
            return
        load.bad += damaged
        self.counts.mismatched += len(damaged)
        for step in damaged:
            self._index.drop(load.hashes[step].tobytes(), name)
        get_logger().warning(
            "pack_mismatched",
            store=self._bucket.name,
            pack=key,
            blocks=len(damaged),
            reason="the object has other bytes than were written",
            effect="these blocks are computed again",
        )

    async def _run(self) -> None:
        async with self:
            await self._over.wait()

    async def _keep_fresh(self) -> None:
        config = self._config
        collects = config.age_max_s is not None or config.budget_bytes is not None
        loop = asyncio.get_running_loop()
        collect_at_s = loop.time() + config.collect_s
        first_s = _FIRST_AGAIN_S
        while True:
            try:
                await self.refresh()
                if self._index.has_events:
                    self._on_change()
                if collects and loop.time() >= collect_at_s:
                    collect_at_s = loop.time() + config.collect_s
                    await self.collect()
                self._was_listed, self._fails = True, False
            except Exception as error:  # noqa: BLE001 - loads and stores go on with the packs that are known
                self.counts.refreshes_failed += 1
                if not self._fails:
                    get_logger().info("packs_refresh_failed", store=self._bucket.name, error=repr(error))
                    if not self._was_listed:
                        self._on_failed(error)
                self._fails = True
            if self._was_listed:
                await asyncio.sleep(config.refresh_s)
            else:
                await asyncio.sleep(min(first_s, config.refresh_s))
                first_s *= 2
