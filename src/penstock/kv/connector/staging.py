"""Host memory between an engine's device blocks and the tiers: one contiguous slot for a block, whatever the device's layout."""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from penstock.core.ids import BlockId
from penstock.kv.device_blocks import DeviceBlocks
from penstock.transfer.regions.arena import Arena

STAGING_BYTES = 64 << 20
_SLOTS_MAX = 1024
_SLOTS_MIN = 4


class DeviceMemory(Protocol):
    """The KV memory of a device process. Its methods block, and are called on one thread of their own.

    Attributes:
        block_bytes: of one block of all layers that the process has.
    """

    block_bytes: int

    def read(self, block_ids: Sequence[int], slots: DeviceBlocks, slot_ids: Sequence[int]) -> None:
        """Copy blocks to slots; complete when it returns."""
        ...

    def write(self, block_ids: Sequence[int], slots: DeviceBlocks, slot_ids: Sequence[int]) -> None:
        """Copy slots to blocks; complete when it returns."""
        ...


class Slots:
    """Free slots, which copies wait for in turn. One event loop owns it."""

    def __init__(self, slot_ids: Sequence[int]) -> None:
        self._free = [BlockId(slot_id) for slot_id in slot_ids]
        self._at_once = max(1, len(self._free) // 2)
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self, count: int) -> list[BlockId]:
        """Wait for slots; returns 1 to `count`, at most half of all. Who has some does not wait for more."""
        while not self._free:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            await turn
        count = min(count, len(self._free), self._at_once)
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def take_now(self, count: int) -> list[BlockId]:
        """Return up to `count` slots that are free now."""
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def give_back(self, slot_ids: Sequence[BlockId]) -> None:
        """Give slots back that nobody reads or writes any more."""
        self._free += slot_ids
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                break


class Staging:
    """The slots: half of them for loads and half for saves, so that saves to a slow tier delay no load.

    Attributes:
        blocks: all slots, as a tier sees them.
        memory: (num_slots * block_bytes,) uint8.
    """

    def __init__(self, block_bytes: int, size_bytes: int = STAGING_BYTES) -> None:
        """Allocate them.

        Args:
            block_bytes: size of one.
            size_bytes: of all, if that is enough for some and not more than copies can use.

        Raises:
            TransferError: the host refuses so much memory.
        """
        self.num_slots = min(_SLOTS_MAX, max(_SLOTS_MIN, size_bytes // block_bytes))
        self._arena = Arena.create(self.num_slots * block_bytes)
        self.memory = self._arena.array
        self.blocks = DeviceBlocks(self._arena.address, block_bytes, self._arena.array)
        half = self.num_slots // 2
        self.loads, self.saves = Slots(range(half)), Slots(range(half, self.num_slots))

    def close(self) -> None:
        """Release the memory."""
        self._arena.close()
