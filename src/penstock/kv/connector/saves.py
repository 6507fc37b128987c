"""Offloads that wait and are under way, as the scheduler's side sees them."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.core.types.events import Tier
from penstock.core.wire import HashArray
from penstock.kv.connector.mirror import TierMirror
from penstock.kv.connector.orders import SaveOrder

_WAITING_MAX = 4096
"""Prefixes that wait; beyond it the oldest are not offloaded."""


class DeviceCache(Protocol):
    """The engine's prefix cache on its device."""

    def pin(self, keys: Sequence[Any]) -> list[int]:
        """Hold the leading blocks that are still cached, so that nobody writes them; returns their ids.

        Args:
            keys: as given to `KvConnectorScheduler.commit`.
        """
        ...

    def unpin(self, block_ids: Sequence[int]) -> None:
        """Give up what one `pin` held."""
        ...


@dataclass(slots=True, eq=False)
class _Waiting:
    block_hashes: HashArray
    keys: Sequence[Any]
    start: int


@dataclass(slots=True, eq=False)
class _Saving:
    block_ids: list[int]
    num_ended: int = 0


class Saves:
    """Pins a bounded number of device blocks while they are read; what waits is not pinned, and lost if it is evicted first."""

    def __init__(self, device: DeviceCache, mirror: TierMirror, *, pinned_max: int) -> None:
        """Make it without work.

        Args:
            device: holds blocks.
            mirror: says what tiers have.
            pinned_max: device blocks that are pinned at most.
        """
        self.tiers: tuple[Tier, ...] = ()
        """That blocks are offloaded to."""
        self._device = device
        self._mirror = mirror
        self._pinned_max = pinned_max
        self._pinned = 0
        self._waiting: deque[_Waiting] = deque()
        self._saving: dict[int, _Saving] = {}
        self._next_id = 0
        self._dropped = 0

    @property
    def is_pending(self) -> bool:
        """Whether something waits or is under way."""
        return bool(self._waiting or self._saving)

    @property
    def has_pinned(self) -> bool:
        """Whether device blocks are pinned."""
        return self._pinned > 0

    def add(self, block_hashes: HashArray, keys: Sequence[Any]) -> None:
        """Offload a prefix that some tier lacks."""
        if self._kept(block_hashes) < len(block_hashes):
            self._waiting.append(_Waiting(block_hashes, keys, 0))
        if len(self._waiting) > _WAITING_MAX:
            lost = self._waiting.popleft()
            self._dropped += len(lost.block_hashes) - lost.start

    def take(self) -> tuple[SaveOrder, ...]:
        """Begin what may be pinned now."""
        orders = []
        while self._waiting and self._pinned < self._pinned_max:
            order = self._begin(self._waiting[0])
            if order is not None:
                orders.append(order)
        return tuple(orders)

    def note(self, save_id: int, num_ranks: int) -> None:
        """Note that a device process reads a save's blocks no more; the last one frees them."""
        saving = self._saving[save_id]
        saving.num_ended += 1
        if saving.num_ended == num_ranks:
            del self._saving[save_id]
            self._pinned -= len(saving.block_ids)
            self._device.unpin(saving.block_ids)

    def take_dropped(self) -> int:
        """Return how many blocks were evicted before they could be copied, since the last call."""
        dropped, self._dropped = self._dropped, 0
        return dropped

    def clear(self) -> None:
        """Forget what waits."""
        self._waiting.clear()

    def check(self) -> None:
        """Raise AssertionError if the pinned blocks are not those of the saves under way."""
        held = sum(len(each.block_ids) for each in self._saving.values())
        assert held == self._pinned, f"{self._pinned} blocks are pinned, {held} are being saved"

    def _kept(self, block_hashes: HashArray) -> int:
        """Count the leading blocks that all tiers have."""
        return min(
            (self._mirror.locate(tier, block_hashes) for tier in self.tiers), default=len(block_hashes)
        )

    def _begin(self, first: _Waiting) -> SaveOrder | None:
        """Begin the next part of the first prefix that waits; it leaves the queue with its last part."""
        hashes = first.block_hashes
        start = max(first.start, self._kept(hashes))
        end = min(len(hashes), start + self._pinned_max - self._pinned)
        first.start = end
        if end == len(hashes):
            self._waiting.popleft()
        if start >= end:
            return None
        # the blocks before `start` may be gone from the device: these are found by their own keys
        block_ids = self._device.pin(first.keys[start:end])
        if len(block_ids) < end - start and end < len(hashes):
            self._waiting.popleft()
            self._dropped += len(hashes) - end
        self._dropped += end - start - len(block_ids)
        if not block_ids:
            return None
        self._next_id += 1
        self._saving[self._next_id] = _Saving(block_ids)
        self._pinned += len(block_ids)
        return SaveOrder(self._next_id, hashes[: start + len(block_ids)], start, block_ids)
