"""Gathers blocks into packs and puts the packs. Blocks that are stored within `gather_s` of each other share packs."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from penstock.core.errors import TransferError
from penstock.kv.buffers import Bytes
from penstock.transfer.storage.bucket import Bucket
from penstock.transfer.storage.packs import Pack, Records, head_bytes, make_head


@dataclass(slots=True, eq=False)
class _OpenPack:
    """Blocks that will be one pack.

    Attributes:
        done: resolved when the pack is in the store; an error if the put failed.
    """

    done: "asyncio.Future[None]"
    timer: asyncio.TimerHandle | None = None
    records: list[Records] = field(default_factory=list)
    blocks: list[Bytes] = field(default_factory=list)


class PackWriter:
    """Puts packs of one namespace. One task owns it."""

    def __init__(
        self,
        bucket: Bucket,
        folder: str,
        namespace: bytes,
        *,
        block_bytes: int,
        pack_blocks: int,
        gather_s: float,
        requests: asyncio.Semaphore,
        may_replace: Callable[[str], bool],
        on_put: Callable[[Pack], None],
    ) -> None:
        """Begin without blocks.

        Args:
            bucket: the store.
            folder: prefix of the keys.
            namespace: its digest.
            block_bytes: of one block.
            pack_blocks: blocks of a full pack.
            gather_s: how long a pack waits for more blocks.
            requests: bounds parallel requests.
            may_replace: whether the object of this name is known to be damaged.
            on_put: called with each pack that is in the store.
        """
        self._bucket = bucket
        self._folder = folder
        self._namespace = namespace
        self._block_bytes = block_bytes
        self._pack_blocks = pack_blocks
        self._gather_s = gather_s
        self._requests = requests
        self._may_replace = may_replace
        self._on_put = on_put
        self._open: _OpenPack | None = None
        self._puts: set[asyncio.Task[None]] = set()

    def add(
        self, records: Records, blocks: list[Bytes], tasks: asyncio.TaskGroup
    ) -> "list[asyncio.Future[None]]":
        """Add n blocks, which must not change any more; returns one future per pack that has any of them.

        Args:
            records: (n,) of the blocks.
            blocks: n arrays.
            tasks: run the puts.
        """
        waits: list[asyncio.Future[None]] = []
        for n, block in enumerate(blocks):
            if self._open is None:
                self._open = self._begin(tasks)
            if not waits or waits[-1] is not self._open.done:
                waits.append(self._open.done)
            self._open.records.append(records[n : n + 1])
            self._open.blocks.append(block)
            if len(self._open.blocks) == self._pack_blocks:
                self.seal(tasks)
        return waits

    def seal(self, tasks: asyncio.TaskGroup) -> None:
        """Put the open pack, although it is not full."""
        pack, self._open = self._open, None
        if pack is None:
            return
        assert pack.timer is not None
        pack.timer.cancel()
        put = tasks.create_task(self._put(pack), name="put a pack")
        self._puts.add(put)
        put.add_done_callback(self._puts.discard)

    async def close(self, tasks: asyncio.TaskGroup, within_s: float) -> None:
        """Put the open pack, and abandon puts that take longer than `within_s`."""
        self.seal(tasks)
        if self._puts:
            await asyncio.wait(self._puts, timeout=within_s)
        for put in self._puts:
            put.cancel()

    def _begin(self, tasks: asyncio.TaskGroup) -> _OpenPack:
        loop = asyncio.get_running_loop()
        pack = _OpenPack(loop.create_future())
        pack.timer = loop.call_later(self._gather_s, self.seal, tasks)
        pack.done.add_done_callback(asyncio.Future.exception)  # whoever waited may have left
        return pack

    async def _put(self, pack: _OpenPack) -> None:
        error: TransferError | None = TransferError(f"{self._bucket.name}: the store of packs was closed")
        try:
            error = await self._try(pack)
        finally:
            if error is None:
                pack.done.set_result(None)
            else:
                pack.done.set_exception(error)

    async def _try(self, pack: _OpenPack) -> TransferError | None:
        records = np.concatenate(pack.records)
        name, head = make_head(self._namespace, self._block_bytes, records)
        try:
            async with self._requests:
                pieces = [head, *(block.data for block in pack.blocks)]
                await self._bucket.create(
                    f"{self._folder}/{name}", pieces, may_replace=self._may_replace(name)
                )
        except TransferError as error:
            return error
        except Exception as error:  # noqa: BLE001 - who waits is told
            return TransferError(f"{self._bucket.name}: putting pack {name} failed: {error!r}")
        start = head_bytes(len(records))
        offsets = start + np.arange(len(records), dtype=np.int64) * self._block_bytes
        self._on_put(Pack(name, records, offsets, start + len(records) * self._block_bytes))
        return None
