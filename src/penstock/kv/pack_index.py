"""Which packs an object store has and which blocks they hold: an index in memory, and the catalogue that keeps it up to date with the store."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np

from penstock.core.clock import wall_time_s
from penstock.core.errors import ConfigError
from penstock.core.log import get_logger
from penstock.core.types.events import BlockRemoved, BlockStored, KvEvent, Tier
from penstock.core.wire import HashArray, pack_hashes
from penstock.kv.pool import block_keys
from penstock.transfer.storage.bucket import Bucket, ObjectInfo
from penstock.transfer.storage.packs import (
    BLOCKS_MAX,
    NAME,
    Pack,
    PackDamaged,
    count_blocks,
    head_bytes,
    parse_head,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PacksConfig:
    """Sizes, times and bounds of packs.

    Attributes:
        pack_bytes: a pack is put once it has so many bytes of blocks,
        gather_s: or so many seconds after its first block came.
        requests: parallel loads, and as many parallel puts; a load takes up to 8 MiB of memory, a put `pack_bytes`.
        request_timeout_s: timeout of one request with its retries.
        retries: of one request, after errors 5xx and lost connections.
        storing_max_bytes: blocks that may be waiting to be put; further ones are not stored.
        refresh_s: seconds between two lists, by which packs of other writers are found.
        packs_max: most packs in the index; the newest ones.
        blocks_max: most blocks in the index, of the newest packs.
        age_max_s: older packs are deleted; None for no such bound.
        budget_bytes: of all packs under the prefix; the oldest ones are deleted beyond it. None for no such bound.
        collect_s: seconds between two collections, if there is such a bound.
    """

    pack_bytes: int = 16 << 20
    gather_s: float = 0.1
    requests: int = 8
    request_timeout_s: float = 30.0
    retries: int = 2
    storing_max_bytes: int = 256 << 20
    refresh_s: float = 15.0
    packs_max: int = 1 << 16
    blocks_max: int = 1 << 18
    age_max_s: float | None = None
    budget_bytes: int | None = None
    collect_s: float = 300.0

    def __post_init__(self) -> None:
        for name in (
            "pack_bytes",
            "requests",
            "request_timeout_s",
            "storing_max_bytes",
            "refresh_s",
            "packs_max",
            "blocks_max",
        ):
            if getattr(self, name) <= 0:
                raise ConfigError(f"packs: {name} must be above 0; got {getattr(self, name)}")
        for name in ("gather_s", "retries", "age_max_s", "budget_bytes", "collect_s"):
            if (getattr(self, name) or 0) < 0:
                raise ConfigError(f"packs: {name} must be >= 0; got {getattr(self, name)}")


@dataclass(slots=True)
class PackCounts:
    """Totals since the store was opened.

    Attributes:
        loaded: blocks that were loaded and verified.
        stored: blocks that were put, or that another writer had put before.
        mismatched: blocks that had other bytes than were written, and were dropped.
        refused: blocks that were not stored, since too many were waiting.
        packs_gone: packs that were deleted, by another writer for example, before they were read.
        packs_refused: objects that are no packs of this namespace.
        packs_deleted: by `collect`.
        refreshes_failed: lists that failed.
    """

    loaded: int = 0
    stored: int = 0
    mismatched: int = 0
    refused: int = 0
    packs_gone: int = 0
    packs_refused: int = 0
    packs_deleted: int = 0
    refreshes_failed: int = 0


_EVENT_BLOCKS_MAX = 1 << 14
"""Blocks in the events of one `take_events`, so that a large store does not hold a step up."""

_HEAP_SLACK = 64


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a block is.

    Attributes:
        name: of its pack.
        offset: in bytes, where it begins in the pack.
        data_sum: CRC-32C that its bytes must have.
    """

    name: str
    offset: int
    data_sum: int


class PackIndex:
    """The known packs of one namespace and their blocks. Not thread-safe; one task owns it.

    A block may be in several packs. It is held while at least one known pack has an undamaged copy.
    A block takes some 250 bytes.
    """

    def __init__(self, block_size: int, blocks_max: int) -> None:
        """Begin without packs.

        Args:
            block_size: tokens in a block.
            blocks_max: blocks to know at most; beyond it the oldest packs are forgotten.
        """
        self._block_size = block_size
        self._blocks_max = blocks_max
        self._packs: dict[str, tuple[Pack, int, float]] = {}  # with its number and date
        self._by_number: dict[int, Pack] = {}
        self._by_date: list[tuple[float, int]] = []
        """A heap of dates and numbers, the oldest first; those of packs that went away are skipped."""
        self._next_number = 0
        self._places: dict[bytes, int | tuple[int, ...]] = {}  # pack number * BLOCKS_MAX + row
        self._damaged: set[str] = set()
        self._changed: dict[bytes, bool] = {}  # whether a block was held at the last events

    def __len__(self) -> int:
        """Blocks that are held."""
        return len(self._places)

    def __contains__(self, name: str) -> bool:
        """Whether a pack is known."""
        return name in self._packs

    @property
    def names(self) -> set[str]:
        """Names of the known packs."""
        return set(self._packs)

    @property
    def has_events(self) -> bool:
        """Whether `take_events` may return any."""
        return bool(self._changed)

    def is_damaged(self, name: str) -> bool:
        """Whether a block of this pack had other bytes than were written."""
        return name in self._damaged

    def locate(self, block_hashes: HashArray) -> int:
        """Count the leading blocks that are held."""
        count = 0
        for key in block_keys(block_hashes):
            if key not in self._places:
                break
            count += 1
        return count

    def find(self, block_hashes: HashArray) -> list[Entry]:
        """Find the leading blocks that are held, in the order of `block_hashes`.

        A block that is in several packs is taken from the pack of the block before it, so that one request loads many blocks.
        """
        found: list[Entry] = []
        before = -1
        for key in block_keys(block_hashes):
            places = self._places_of(key)
            if not places:
                break
            place = next((each for each in places if each // BLOCKS_MAX == before), places[0])
            before, row = divmod(place, BLOCKS_MAX)
            pack = self._by_number[before]
            found.append(Entry(pack.name, int(pack.offsets[row]), int(pack.records["data_sum"][row])))
        return found

    def newest(self, count: int) -> HashArray:
        """Give the hashes of up to `count` held blocks, of the packs that were added last: (n, 2) uint64, empty without any."""
        found = [np.zeros((0, 2), np.uint64)]
        for pack, _, _ in reversed(self._packs.values()):
            hashes = pack.hashes[: count - sum(map(len, found))]
            found.append(hashes[: self.locate(hashes)])
            if sum(map(len, found)) >= count:
                break
        return np.concatenate(found)

    def add(self, pack: Pack, modified_s: float) -> None:
        """Add a pack whose head was verified; one that is known is replaced, and counts as undamaged.

        Args:
            pack: the pack.
            modified_s: its date.
        """
        self.remove([pack.name])
        number = self._next_number
        self._next_number += 1
        self._packs[pack.name] = (pack, number, modified_s)
        self._by_number[number] = pack
        heappush(self._by_date, (modified_s, number))
        if len(self._by_date) > 2 * len(self._packs) + _HEAP_SLACK:
            self._by_date = [(date_s, number) for _, number, date_s in self._packs.values()]
            heapify(self._by_date)
        for row, key in enumerate(block_keys(pack.hashes)):
            self._changed.setdefault(key, key in self._places)
            place = number * BLOCKS_MAX + row
            self._places[key] = (*self._places_of(key), place) if key in self._places else place
        while len(self._places) > self._blocks_max and len(self._packs) > 1:
            oldest = self._by_number.get(heappop(self._by_date)[1])
            if oldest is not None:
                self.remove([oldest.name])

    def remove(self, names: Iterable[str]) -> None:
        """Forget packs that went away; unknown names are ignored."""
        for name in names:
            self._damaged.discard(name)
            if name in self._packs:
                pack, number, _ = self._packs.pop(name)
                for key in block_keys(pack.hashes):
                    self._forget(key, number)
                del self._by_number[number]

    def drop(self, block_hash: bytes, name: str) -> None:
        """Forget a damaged copy of a block in a pack; the pack's other blocks stay."""
        if name in self._packs:
            self._damaged.add(name)
            self._forget(block_hash, self._packs[name][1])

    def clear(self) -> None:
        """Forget all packs, and events that were not taken."""
        self.remove(tuple(self._packs))
        self._changed.clear()

    def take_events(self) -> tuple[KvEvent, ...]:
        """Return what is held now and was not before, and the reverse; the rest at the next call if it is much."""
        changed = self._changed
        if len(changed) > _EVENT_BLOCKS_MAX:
            keys = list(changed)
            self._changed = {key: changed[key] for key in keys[_EVENT_BLOCKS_MAX:]}
            changed = {key: changed[key] for key in keys[:_EVENT_BLOCKS_MAX]}
        else:
            self._changed = {}
        gone = [key for key, was_held in changed.items() if was_held and key not in self._places]
        new = {key: None for key, was_held in changed.items() if not was_held and key in self._places}
        events: list[KvEvent] = []
        if gone:
            lows = np.frombuffer(b"".join(gone), "<u8")[::2]
            events.append(BlockRemoved(block_hashes=pack_hashes(lows), tier=Tier.OBJECT))
        while new:
            place = self._places_of(next(iter(new)))[0]
            events.append(self._take_run(self._by_number[place // BLOCKS_MAX], place % BLOCKS_MAX, new))
        return tuple(events)

    def check(self) -> None:
        """Raise AssertionError if blocks and packs differ."""
        assert self._damaged <= self._packs.keys(), "a damaged pack that is not known"
        assert {number for _, number, _ in self._packs.values()} == self._by_number.keys(), "packs by number"
        dates = {number: date_s for _, number, date_s in self._packs.values()}
        assert dates.items() <= {number: date_s for date_s, number in self._by_date}.items(), (
            "a pack without its date"
        )
        listed: set[tuple[bytes, str]] = set()
        for key in self._places:
            places = self._places_of(key)
            assert places, "a block without a place"
            listed |= {(key, self._by_number[place // BLOCKS_MAX].name) for place in places}
            assert len(set(places)) == len(places), "a place twice"
        every = {(key, name) for name, (pack, _, _) in self._packs.items() for key in block_keys(pack.hashes)}
        assert listed <= every, "a block in a pack that does not have it"
        missing = {name for _, name in every - listed}
        assert missing <= self._damaged, "a sound pack with a block that is not found"

    def _places_of(self, key: bytes) -> tuple[int, ...]:
        places = self._places.get(key, ())
        return places if isinstance(places, tuple) else (places,)

    def _forget(self, key: bytes, number: int) -> None:
        before = self._places_of(key)
        places = tuple(place for place in before if place // BLOCKS_MAX != number)
        if places == before:
            return
        self._changed.setdefault(key, True)
        if places:
            self._places[key] = places if len(places) > 1 else places[0]
        else:
            del self._places[key]

    def _take_run(self, pack: Pack, row: int, new: dict[bytes, None]) -> BlockStored:
        """Make the event of the blocks from a row of a pack on that are each the child of the one before; takes them from `new`."""
        hashes, parents = pack.hashes, pack.records["parent"]
        keys = block_keys(hashes)
        end = row
        while end < len(keys) and keys[end] in new and (end == row or parents[end] == hashes[end - 1, 0]):
            del new[keys[end]]
            end += 1
        return BlockStored(
            block_hashes=pack_hashes(np.ascontiguousarray(hashes[row:end, 0])),
            parent_block_hash=int(parents[row]) or None,
            block_size=self._block_size,
            tier=Tier.OBJECT,
        )


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
