"""Offloads that wait and are under way, as the scheduler's side sees them."""

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.core.types.events import Tier
from penstock.core.wire import HashArray
from penstock.kv.connector.mirror import TierMirror
from penstock.kv.connector.orders import SaveOrder
from penstock.kv.groups import KvGroups

_WAITING_MAX = 4096
"""Prefixes that wait; beyond it the oldest are not offloaded."""


class DeviceCache(Protocol):
    """The engine's prefix cache on its device."""

    def pin(self, keys: Sequence[Any]) -> list[int]:
        """Hold the leading blocks that are still cached, so that nobody writes them; returns their ids.

        Args:
            keys: of consecutive blocks, as given to `KvConnectorScheduler.commit`.
        """
        ...

    def unpin(self, block_ids: Sequence[int]) -> None:
        """Give up what one `pin` held."""
        ...


@dataclass(slots=True, eq=False)
class _Chain:
    """Blocks of which each is the child of the one before it; those before `start` are in all tiers, or were begun."""

    block_hashes: HashArray
    keys: Sequence[Any]
    start: int

    @property
    def num_left(self) -> int:
        return len(self.block_hashes) - self.start


@dataclass(slots=True, eq=False)
class _Saving:
    block_ids: list[int]
    num_ended: int = 0


class Saves:
    """Pins a bounded number of device blocks while they are read; what waits is not pinned, and lost if it is evicted first."""

    def __init__(self, device: DeviceCache, mirror: TierMirror, groups: KvGroups, *, pinned_max: int) -> None:
        """Make it without work.

        Args:
            device: holds blocks.
            mirror: says what tiers have.
            groups: of the model's layers.
            pinned_max: device blocks that are pinned at most.
        """
        self.tiers: tuple[Tier, ...] = ()
        """That blocks are offloaded to."""
        self._device = device
        self._mirror = mirror
        self._groups = groups
        self._pinned_max = pinned_max
        self._pinned = 0
        self._waiting: deque[deque[_Chain]] = deque()
        """By prefix; none is empty."""
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

    def add(self, block_hashes: HashArray, keys: Sequence[Sequence[Any]], ends: Collection[int]) -> None:
        """Offload what some tier lacks of a prefix; arguments are those of `KvConnectorScheduler.commit`."""
        first = keys[self._groups.places[0].group]
        chains = deque([_Chain(block_hashes, first, 0)])
        chains += self._others(block_hashes, keys, ends)
        lacking = deque(chain for chain in chains if self._kept(chain.block_hashes) < len(chain.block_hashes))
        if lacking:
            self._waiting.append(lacking)
        if len(self._waiting) > _WAITING_MAX:
            self._drop(self._waiting.popleft())

    def take(self) -> tuple[SaveOrder, ...]:
        """Begin what may be pinned now."""
        orders = []
        while self._waiting and self._pinned < self._pinned_max:
            chains = self._waiting[0]
            order = self._begin(chains)
            if not chains:
                self._waiting.popleft()
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

    def _others(
        self, block_hashes: HashArray, keys: Sequence[Sequence[Any]], ends: Collection[int]
    ) -> Iterator[_Chain]:
        """Give the blocks of all groups but the first, by position: what hangs on the first group's block there."""
        total = len(block_hashes)
        num_groups = [0] * total
        for end in sorted(ends):
            for number, place in enumerate(self._groups.others, 1):
                for position in range(place.start(min(end, total)), min(end, total)):
                    num_groups[position] = max(num_groups[position], number)
        for position, number in enumerate(num_groups):
            if number:
                places = self._groups.others[:number]
                names = self._groups.chain(block_hashes[position : position + 1], places)
                keyed = [keys[place.group][position] for place in self._groups.places[: number + 1]]
                yield _Chain(names, keyed, 1)

    def _drop(self, chains: Iterable[_Chain]) -> None:
        self._dropped += sum(chain.num_left for chain in chains)

    def _kept(self, block_hashes: HashArray) -> int:
        """Count the leading blocks that all tiers have."""
        return min(
            (self._mirror.locate(tier, block_hashes) for tier in self.tiers), default=len(block_hashes)
        )

    def _begin(self, chains: deque[_Chain]) -> SaveOrder | None:
        """Begin the next part of a prefix's first chain, which leaves with its last part."""
        chain = chains[0]
        hashes = chain.block_hashes
        start = max(chain.start, self._kept(hashes))
        end = min(len(hashes), start + self._pinned_max - self._pinned)
        chain.start = end
        if end == len(hashes):
            chains.popleft()
        if start >= end:
            return None
        # the blocks before `start` may be gone from the device: these are found by their own keys
        block_ids = self._device.pin(chain.keys[start:end])
        if len(block_ids) < end - start and end < len(hashes):
            chains.popleft()
            self._dropped += len(hashes) - end
        self._dropped += end - start - len(block_ids)
        if not block_ids:
            return None
        self._next_id += 1
        self._saving[self._next_id] = _Saving(block_ids)
        self._pinned += len(block_ids)
        return SaveOrder(self._next_id, hashes[: start + len(block_ids)], start, block_ids)
