"""Follows which packs an object store has: lists them, reads the heads of new ones into the index, deletes old ones."""

import asyncio

from penstock.core.clock import wall_time_s
from penstock.core.log import get_logger
from penstock.kv.object.config import PacksConfig
from penstock.kv.object.counts import PackCounts
from penstock.kv.object.index import PackIndex
from penstock.transfer.storage.bucket import Bucket, ObjectInfo
from penstock.transfer.storage.packs import NAME, PackDamaged, count_blocks, head_bytes, parse_head

_HEAD_GUESS_BYTES = 4096  # enough for 126 blocks
_HEAD_READERS = 4
_DELETED_AT_ONCE = 1000


class PackCatalogue:
    """Keeps an index up to date with a store. One task owns it.

    Attributes:
        folder: prefix of this namespace's keys.
        refused: names of objects that are no packs of this namespace.
    """

    def __init__(
        self,
        bucket: Bucket,
        prefix: str,
        namespace: bytes,
        block_bytes: int,
        *,
        config: PacksConfig,
        index: PackIndex,
        counts: PackCounts,
    ) -> None:
        """Make one that has listed nothing yet."""
        self.folder = f"{prefix}/{namespace.hex()}"
        self.refused: set[str] = set()
        self._bucket = bucket
        self._prefix = prefix
        self._namespace = namespace
        self._block_bytes = block_bytes
        self._config = config
        self._index = index
        self._counts = counts
        self._modified_s: dict[str, float] = {}  # of the packs in the last list
        self._refreshing = asyncio.Lock()

    async def refresh(self) -> None:
        """List the packs of this namespace: add those of other writers to the index, and remove deleted ones.

        Raises:
            TransferError: the object store failed.
        """
        async with self._refreshing:
            known = self._index.names  # a pack that is put meanwhile may not be in the list
            listed = self._newest(await self._bucket.list(self.folder))
            dates = self._modified_s
            changed = {name for name in listed.keys() & dates if listed[name].modified_s != dates[name]}
            self._index.remove(known - listed.keys())
            self.refused &= listed.keys() - changed
            unread = [
                info
                for name, info in listed.items()
                if (name in changed and self._index.is_damaged(name))
                or not (name in self._index or name in self.refused)
            ]
            await self._read_heads(unread)
            self._modified_s = {name: info.modified_s for name, info in listed.items()}

    async def collect(self) -> int:
        """Delete packs of all namespaces under the prefix that are too old or beyond the budget, the oldest first.

        Several writers may collect at once, since all choose the same packs. Age is this host's time less the store's date.

        Returns:
            how many packs were deleted.

        Raises:
            TransferError: the object store failed.
        """
        config = self._config
        packs = [info for info in await self._bucket.list(self._prefix) if self._is_pack(info.key)]
        packs.sort(key=lambda info: (info.modified_s, info.key))
        now_s = wall_time_s()
        left_bytes = sum(info.size_bytes for info in packs)
        gone = []
        for info in packs:
            too_old = config.age_max_s is not None and now_s - info.modified_s > config.age_max_s
            too_much = config.budget_bytes is not None and left_bytes > config.budget_bytes
            if too_old or too_much:
                gone.append(info.key)
                left_bytes -= info.size_bytes
        for start in range(0, len(gone), _DELETED_AT_ONCE):
            keys = gone[start : start + _DELETED_AT_ONCE]
            self._index.remove(key.rpartition("/")[2] for key in keys if key.startswith(f"{self.folder}/"))
            await self._bucket.delete(keys)
            self._counts.packs_deleted += len(keys)
        return len(gone)

    async def _read_heads(self, packs: list[ObjectInfo]) -> None:
        before = self._counts.packs_refused
        waiting = iter(packs)

        async def read() -> None:
            for info in waiting:
                await self._read_head(info)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(_HEAD_READERS, len(packs))):
                    group.create_task(read())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        if self._counts.packs_refused > before:
            get_logger().warning(
                "packs_refused",
                store=self._bucket.name,
                folder=self.folder,
                packs=self._counts.packs_refused - before,
                reason="these objects are no packs of this namespace, or are damaged",
                effect="their blocks are computed again",
            )

    async def _read_head(self, info: ObjectInfo) -> None:
        name = info.key.rpartition("/")[2]
        data = await self._bucket.get(info.key, 0, max(min(info.size_bytes, _HEAD_GUESS_BYTES), 1))
        try:
            if data is not None and (needed := head_bytes(count_blocks(data))) > len(data):
                data = await self._bucket.get(info.key, 0, needed)
            if data is None:
                return  # it was deleted meanwhile
            pack = parse_head(
                name, data, info.size_bytes, namespace=self._namespace, block_bytes=self._block_bytes
            )
        except PackDamaged as error:
            get_logger().debug("pack_refused", store=self._bucket.name, pack=info.key, reason=str(error))
            self._index.remove([name])
            self.refused.add(name)
            self._counts.packs_refused += 1
        else:
            self._index.add(pack, info.modified_s)

    def _newest(self, infos: list[ObjectInfo]) -> dict[str, ObjectInfo]:
        """Take the newest packs of a list: `packs_max` and about `blocks_max` blocks at most."""
        packs = [info for info in infos if info.key.startswith(f"{self.folder}/") and self._is_pack(info.key)]
        packs.sort(key=lambda info: info.modified_s, reverse=True)
        newest: dict[str, ObjectInfo] = {}
        left_bytes = self._config.blocks_max * self._block_bytes
        for info in packs[: self._config.packs_max]:
            left_bytes -= info.size_bytes
            if left_bytes < 0 and newest:
                break
            newest[info.key.rpartition("/")[2]] = info
        return newest

    def _is_pack(self, key: str) -> bool:
        """Whether a key is PREFIX/namespace/name; others are left alone."""
        above, _, name = key.rpartition("/")
        prefix, _, namespace = above.rpartition("/")
        return prefix == self._prefix and bool(NAME.match(name) and NAME.match(namespace))
