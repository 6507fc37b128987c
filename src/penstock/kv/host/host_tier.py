"""The host tier: blocks that the device gives up stay in the machine's memory, for all workers of the host."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from penstock.core.ids import BlockId
from penstock.core.log import get_logger
from penstock.core.types.events import KvEvent, Tier
from penstock.core.wire import HashArray
from penstock.kv.device_blocks import DeviceBlocks
from penstock.kv.host.copies import HostLoad, Piece, copy_from_device, copy_to_device
from penstock.kv.host.extent import CHANGED, USED, WRONG, Extent, ExtentLayout, namespace_key, slots_of
from penstock.kv.host.memory import HostMemory, HostPart
from penstock.kv.host.probe import probe_copies
from penstock.kv.host.sibling import Sibling
from penstock.kv.measured import LOAD_HALF_LIFE_S, MeasuredSpeed
from penstock.kv.namespace import Namespace
from penstock.kv.pool.pool import BlockPool
from penstock.kv.pool.prefixes import block_keys, commit_chains, commit_runs
from penstock.kv.pool.use import BlockUse, EvictionPolicy
from penstock.transfer.regions.ranges import Numbers
from penstock.transfer.storage.slots import RECORD, Records

_POLL_S = 0.1
"""How often a worker without requests looks at what the others of its host have told."""
_CHUNK_BYTES = 32 << 20
"""Of one load: 4 ms at 8 GB/s."""
_EPOCH_SHIFT = 40
_USE = BlockUse()
_PRIVATE = Namespace(model_digest="", dtype="", layout="", block_size=0)


class HostTier:
    """A `KvTier` in memory of the host. Each block is stored with its CRC-32C, and verified when it is loaded.

    Alone (`part` is None) its memory ends with it. With a part of its host's arena it writes its own extent, which outlives
    it, and loads blocks of the other workers' extents too. Any process with a `HostPart` of its own number may make it.

    The own extent's index is a `BlockPool` whose blocks are slots. Loads have one thread, and offloads another.
    """

    tier = Tier.HOST
    is_off = False
    probe = staticmethod(probe_copies)

    def __init__(
        self,
        device: DeviceBlocks,
        num_blocks: int,
        block_size: int,
        *,
        part: HostPart | None = None,
        namespace: Namespace = _PRIVATE,
        eviction: EvictionPolicy = "seconds",
    ) -> None:
        """Take the memory; `close` releases it.

        Args:
            device: the engine's blocks.
            num_blocks: blocks to keep.
            block_size: tokens in a block.
            part: of the host's arena; None for memory of its own.
            namespace: of the blocks; those of other namespaces are not seen.
            eviction: as in `BlockPool`. A block is used when it is stored and at each load.

        Raises:
            ConfigError: the host has not enough memory, or another process has the extent.
        """
        self.num_blocks = num_blocks
        self.block_bytes = device.block_bytes
        self.chunk_blocks = max(_CHUNK_BYTES // device.block_bytes, 1)
        self.num_corrupt = 0
        self._device = device
        self._number = 0 if part is None else part.number
        key = namespace_key(namespace)
        layout = ExtentLayout(num_blocks, device.block_bytes)
        self._memory = HostMemory(layout, key, part)
        self._extent = Extent(self._memory.own, layout, key)
        self._siblings = [
            Sibling(number, memory, key, device.block_bytes, block_size)
            for number, memory in self._memory.others.items()
        ]
        self.shared = None if part is None else part.holder(namespace, num_blocks)
        self._pool = BlockPool(num_blocks, block_size, eviction, Tier.HOST)
        self._tick = 0
        self._adopt()
        self._speed = MeasuredSpeed(half_life_s=LOAD_HALF_LIFE_S)
        self._waiting_blocks = 0  # of loads under way
        self._loads: set[HostLoad] = set()
        self._storing: set[bytes] = set()
        self._num_cleared = 0
        self._load_thread = ThreadPoolExecutor(1, "kv-host-load")
        self._store_thread = ThreadPoolExecutor(1, "kv-host-offload")
        self._polling: asyncio.TimerHandle | None = None
        self._has_changed = False  # other extents, since events were taken
        self._is_closed = False

    @property
    def num_cached(self) -> int:
        """Blocks that its own extent keeps."""
        return self._pool.num_cached

    @property
    def num_shared(self) -> int:
        """Blocks that the other workers of the host keep, of which it can load those of its namespace."""
        return sum(sibling.pool.num_cached for sibling in self._siblings if sibling.pool is not None)

    @property
    def offload_room(self) -> int:
        """Blocks that its extent can keep: copies within a host are quick."""
        return self.num_blocks

    def start(self, on_change: Callable[[], None]) -> None:
        """Begin to look at the other workers; `on_change` is called when they have stored or given up blocks."""

        def poll() -> None:
            self._polling = asyncio.get_running_loop().call_later(_POLL_S, poll)
            self._poll()
            if self._has_changed:
                on_change()

        if self._siblings and self._polling is None:
            self._polling = asyncio.get_running_loop().call_later(_POLL_S, poll)

    def locate(self, block_hashes: HashArray) -> int:
        """Count the leading blocks that the workers of the host keep."""
        self._poll()
        return sum(len(piece.slots) for piece in self._find(block_hashes))

    def load_s(self, num_blocks: int) -> float:
        """Predict the seconds until so many blocks are loaded."""
        return self._speed.seconds(self._waiting_blocks + num_blocks)

    def load(
        self, block_hashes: HashArray, targets: Sequence[BlockId], done: Callable[[int], None]
    ) -> HostLoad:
        """Copy leading blocks to the device, and verify them."""
        load = self._draft(block_hashes, targets)
        for piece in load.pieces:
            if piece.sibling is None:
                self._pool.acquire(piece.slots)
        self._loads.add(load)
        self._waiting_blocks += len(load.targets)

        def on_end(future: "asyncio.Future[int]") -> None:
            self._on_loaded(load, future, done)

        asyncio.get_running_loop().run_in_executor(
            self._load_thread, copy_to_device, self._device, load
        ).add_done_callback(on_end)
        return load

    def offload(
        self, block_hashes: HashArray, block_ids: Sequence[BlockId], done: Callable[[Sequence[BlockId]], None]
    ) -> Sequence[BlockId]:
        """Begin to copy those of a prefix's blocks that the host lacks from the device."""
        self._poll()
        held, new = self._split(block_hashes)
        self._pool.acquire(held)
        new = new[: self._pool.num_available]
        taken = self._pool.allocate(len(new)) if new and not self._is_closed else None
        self._release(held)  # as the newest, and not evicted for their own children
        if not taken:
            return ()
        self._extent.clear(taken)
        self._extent.note(CHANGED, self._number, taken)
        storing = block_keys(block_hashes[new])
        self._storing.update(storing)
        sources = [block_ids[index] for index in new]
        parents = np.concatenate([[np.uint64(0)], block_hashes[:-1, 0]])[new]
        records = self._extent.draft(block_hashes[new], parents, taken, self._ticked(len(new)))
        num_cleared = self._num_cleared

        def on_end(future: "asyncio.Future[None]") -> None:
            self._storing.difference_update(storing)
            error = future.exception()
            if error is not None:
                get_logger().error(
                    "kv_save_failed", tier=self.tier, error=str(error), effect="blocks are not offloaded"
                )
            elif num_cleared == self._num_cleared:
                self._extent.publish(taken, records)
                self._extent.note(CHANGED, self._number, taken)
                commit_runs(self._pool, block_hashes, new, taken)
            self._release(taken, _USE)
            done(sources)

        asyncio.get_running_loop().run_in_executor(
            self._store_thread,
            copy_from_device,
            self._device,
            sources,
            self._extent.addresses(taken),
            records,
        ).add_done_callback(on_end)
        return sources

    def take_events(self) -> tuple[KvEvent, ...]:
        """Return the KV events since the last call, in order: of all extents."""
        self._has_changed = False
        events = self._pool.take_events()
        for sibling in self._siblings:
            events += sibling.take_events()
        return events

    def clear(self) -> None:
        """Forget all blocks, also those that the other workers of the host keep now."""
        self._num_cleared += 1
        self._pool.reset()
        self._extent.clear(slice(None))
        self._extent.note(CHANGED, self._number, range(self.num_blocks))
        for sibling in self._siblings:
            sibling.ignore()

    async def close(self) -> None:
        """End all copies and release the memory; blocks in the host's arena stay there. Safe twice."""
        self._is_closed = True
        if self._polling is not None:
            self._polling.cancel()
        for load in self._loads:
            load.cancel()
        loop = asyncio.get_running_loop()
        for thread in (self._load_thread, self._store_thread):
            await loop.run_in_executor(None, thread.shutdown)
        await asyncio.sleep(0)  # the callbacks of the last copies run
        self._siblings.clear()  # with their mappings
        self._memory.close()

    def check(self) -> None:
        """Raise AssertionError if the state is inconsistent."""
        self._pool.check()
        for sibling in self._siblings:
            sibling.check()

    # ---- on the event loop ----------------------------------------------------------------------------

    def _adopt(self) -> None:
        """Take over the extent, with the blocks that a process before this one has left in it."""
        slots, records = self._extent.adopt()
        self._tick = self._extent.epoch << _EPOCH_SHIFT
        self._pool.allocate(self.num_blocks)
        commit_chains(self._pool, slots, records)
        kept = set(slots.tolist())
        self._pool.release([BlockId(slot) for slot in range(self.num_blocks) if slot not in kept])
        for slot in slots.tolist():  # least recently used first
            self._pool.release([BlockId(slot)], _USE)

    def _poll(self) -> None:
        """Take in what the other workers have told."""
        for sibling in self._siblings:
            epoch = sibling.epoch
            notes = sibling.poll()
            self._has_changed |= notes is not None or sibling.epoch != epoch
            if notes is None:
                continue
            for slot in slots_of(notes, USED, self._number).tolist():
                self._touch(slot)
            for slot in slots_of(notes, WRONG, self._number).tolist():
                self._drop(slot)

    def _find(self, hashes: HashArray) -> list[Piece]:
        """Find where leading blocks are."""
        pieces: list[Piece] = []
        at = 0
        while at < len(hashes) and (piece := self._match(hashes[at:])) is not None:
            pieces.append(piece)
            at += len(piece.slots)
        return pieces

    def _match(self, hashes: HashArray) -> Piece | None:
        """Find the leading blocks that one extent has; None if the first is in none."""
        slots = self._pool.match(hashes)
        if slots:
            return Piece(None, slots)
        for sibling in self._siblings:
            if sibling.pool is not None and (slots := sibling.pool.match(hashes)):
                return Piece(sibling, slots)
        return None

    def _split(self, hashes: HashArray) -> tuple[list[BlockId], list[int]]:
        """Find the blocks of a prefix in the own extent, and the indexes of those that no extent has or is getting."""
        keys = block_keys(hashes) if self._storing else ()
        held: list[BlockId] = []
        missing: list[int] = []
        at = 0
        while at < len(hashes):
            piece = self._match(hashes[at:])
            if piece is None:
                if not keys or keys[at] not in self._storing:
                    missing.append(at)
                at += 1
                continue
            if piece.sibling is None:
                held += piece.slots
            at += len(piece.slots)
        return held, missing

    def _draft(self, hashes: HashArray, targets: Sequence[BlockId]) -> HostLoad:
        """Find what to copy, with the checksums that records have now."""
        self._poll()
        pieces: list[Piece] = []
        records: list[Records] = []
        sources: list[Numbers] = []
        at = 0
        for piece in self._find(hashes[: len(targets)]):
            extent = self._extent
            if piece.sibling is None:
                found = extent.records(piece.slots)
            else:
                assert piece.sibling.extent is not None, "it has blocks"
                extent = piece.sibling.extent
                found = piece.sibling.fresh_records(piece.slots, hashes[at : at + len(piece.slots)])
                self._extent.note(USED, piece.sibling.number, piece.slots)
            is_whole = len(found) == len(piece.slots)
            del piece.slots[len(found) :]
            pieces.append(piece)
            records.append(found)
            sources.append(extent.addresses(piece.slots))
            at += len(found)
            if not is_whole:
                break
        return HostLoad(
            pieces,
            np.concatenate([np.zeros(0, np.uint64), *sources]),
            np.concatenate([np.zeros(0, RECORD), *records]),
            list(targets[:at]),
        )

    def _on_loaded(self, load: HostLoad, future: "asyncio.Future[int]", done: Callable[[int], None]) -> None:
        error = future.exception()
        if error is not None:
            get_logger().error(
                "kv_load_failed", tier=self.tier, error=str(error), effect="blocks are computed"
            )
        loaded = 0 if error is not None else future.result()
        if loaded < len(load.targets) and not load.stop[0] and error is None:
            self._on_mismatch(load.place(loaded), load.records[loaded])
        loaded = min(loaded, self._count_unchanged(load))
        if loaded:
            self._speed.measure(loaded, load.seconds)
        self._waiting_blocks -= len(load.targets)
        self._loads.discard(load)
        for piece in load.pieces:
            if piece.sibling is None:
                self._release(piece.slots, _USE)
        done(loaded)

    def _count_unchanged(self, load: HostLoad) -> int:
        """Count the leading blocks whose records are still what they were; own ones were held meanwhile."""
        at = 0
        for piece in load.pieces:
            end = at + len(piece.slots)
            if piece.sibling is not None:
                count = piece.sibling.count_unchanged(piece.slots, load.records[at:end])
                if count < len(piece.slots):
                    return at + count
            at = end
        return at

    def _on_mismatch(self, place: Piece, record: Records) -> None:
        """Drop a block whose bytes were not those of its record, unless its worker has overwritten it meanwhile."""
        (slot,) = place.slots
        if place.sibling is None:
            self._drop(slot)
        elif not place.sibling.count_unchanged(place.slots, record):
            return
        else:
            place.sibling.drop(slot)
            self._extent.note(WRONG, place.sibling.number, place.slots)
        self.num_corrupt += 1
        get_logger().warning(
            "kv_block_corrupt",
            tier=self.tier,
            corrupt=self.num_corrupt,
            effect="the block is dropped, and computed instead",
        )

    def _touch(self, slot: int) -> None:
        """Note that another worker has used a block."""
        held = self._resident(slot)
        self._pool.acquire(held)
        self._release(held, _USE)

    def _drop(self, slot: int) -> None:
        """Forget a block whose bytes are wrong."""
        held = self._resident(slot)
        if held:
            self._pool.acquire(held)
            self._pool.forget(held)
            self._extent.clear(held)
            self._extent.note(CHANGED, self._number, held)
            self._pool.release(held)

    def _resident(self, slot: int) -> list[BlockId]:
        """Return [slot] if the own extent has a block in it."""
        if not 0 <= slot < self.num_blocks:
            return []
        return [found for found in self._pool.match(self._extent.records([slot])["hash"]) if found == slot]

    def _release(self, slots: list[BlockId], use: BlockUse | None = None) -> None:
        """Release blocks of one prefix as the newest; the first is the last to be evicted."""
        tick = self._ticked(len(slots))
        self._extent.used[slots] = np.arange(tick + len(slots), tick, -1, dtype=np.uint64)
        self._pool.release(slots, use)

    def _ticked(self, count: int) -> int:
        """Reserve numbers; returns the one before the first."""
        tick, self._tick = self._tick, self._tick + count
        return tick
