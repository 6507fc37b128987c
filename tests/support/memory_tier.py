"""A KV tier on the event loop's time, virtual or not: it keeps bytes in a dictionary, and fails when a test says so."""

import asyncio
from collections.abc import Callable, Sequence

import numpy as np

from penstock.core.ids import BlockId
from penstock.core.types.events import KvEvent, Tier
from penstock.core.wire import HashArray
from penstock.kv.device_blocks import DeviceBlocks


class MemoryLoad:
    """A load under way; it writes its targets at its end."""

    def __init__(self, end: Callable[["MemoryLoad"], None]) -> None:
        self.is_cancelled = False
        self._end = end

    def cancel(self, *, is_late: bool = False) -> None:
        self.is_cancelled = True
        self._end(self)


class MemoryTier:
    """Loads take `block_s` for each block; they bring none while `fails`."""

    num_blocks = 1_000
    shared = None
    offload_room = 1_000
    chunk_blocks = 1_000
    num_corrupt = 0
    is_off = False

    def __init__(self, device: DeviceBlocks, *, tier: Tier = Tier.HOST, block_s: float = 0.0) -> None:
        self.tier = tier
        self.block_bytes = device.block_bytes
        self.block_s = block_s
        self.fails = False
        self.loads: list[MemoryLoad] = []
        self.loaded_s: list[float] = []
        """When each load began."""
        self._device = device
        self._kept: dict[int, bytes] = {}

    def probe(self) -> float | None:
        return None

    def start(self, on_change: Callable[[], None]) -> None: ...

    @property
    def num_cached(self) -> int:
        return len(self._kept)

    def locate(self, block_hashes: HashArray) -> int:
        lows = block_hashes[:, 0].tolist()
        return next((index for index, low in enumerate(lows) if low not in self._kept), len(lows))

    def load_s(self, num_blocks: int) -> float:
        return num_blocks * self.block_s

    def load(
        self, block_hashes: HashArray, targets: Sequence[BlockId], done: Callable[[int], None]
    ) -> MemoryLoad:
        loop = asyncio.get_running_loop()
        self.loaded_s.append(loop.time())

        def end(load: MemoryLoad) -> None:
            timer.cancel()
            if load in self.loads:
                self.loads.remove(load)
                loop.call_soon(finish, load)

        def finish(load: MemoryLoad) -> None:
            brings = not (self.fails or load.is_cancelled)
            if brings:
                lows = block_hashes[:, 0].tolist()
                for low, view in zip(lows, self._device.views(targets), strict=True):
                    view[:] = np.frombuffer(self._kept[low], np.uint8)
            done(len(targets) if brings else 0)

        load = MemoryLoad(end)
        self.loads.append(load)
        timer = loop.call_later(self.block_s * len(targets), end, load)
        return load

    def offload(
        self, block_hashes: HashArray, block_ids: Sequence[BlockId], done: Callable[[Sequence[BlockId]], None]
    ) -> Sequence[BlockId]:
        lows = block_hashes[: len(block_ids), 0].tolist()
        read = [block_id for low, block_id in zip(lows, block_ids, strict=True) if low not in self._kept]
        for low, view in zip(lows, self._device.views(block_ids), strict=True):
            self._kept.setdefault(low, view.tobytes())
        if read:
            asyncio.get_running_loop().call_soon(done, read)
        return read

    def take_events(self) -> tuple[KvEvent, ...]:
        return ()

    def clear(self) -> None:
        self._kept.clear()

    async def close(self) -> None:
        for load in list(self.loads):
            load.cancel()
        await asyncio.sleep(0)
