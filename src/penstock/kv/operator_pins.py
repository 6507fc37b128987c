"""What an operator does to an engine's KV cache: list, pin, unpin, evict, flush."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import assert_never

import numpy as np

from penstock.core.clock import Clock, LoopClock, Timer
from penstock.core.errors import RequestError
from penstock.core.ids import BlockId
from penstock.core.types.events import Tier
from penstock.core.types.kv import (
    KvAction,
    KvEvict,
    KvFlush,
    KvList,
    KvPin,
    KvPinned,
    KvReport,
    KvUnpin,
)
from penstock.core.wire import HashArray, unpack_hashes
from penstock.kv.pool import BlockPool, Pins
from penstock.kv.retention import RetentionConfig, check_ttl


@dataclass(frozen=True, slots=True, eq=False)
class OperatorPin:
    """A named prefix whose blocks are kept until `expires_s` on the clock.

    Attributes:
        block_ids: its leading blocks that were resident, at least one.
        timer: ends the pin.
    """

    name: str
    block_ids: list[BlockId]
    expires_s: float
    timer: Timer


class OperatorPins:
    """Keeps pinned prefixes on the device within a quota of blocks. Not thread-safe; one task owns it."""

    def __init__(
        self, pool: BlockPool, pins: Pins, config: RetentionConfig, *, clock: Clock | None = None
    ) -> None:
        """Keep nothing yet.

        Args:
            pool: the device's blocks.
            pins: of this pool; prefixes are pinned through them.
            config: bounds.
            clock: of TTLs; None is the event loop's.
        """
        self.on_change: Callable[[], None] = lambda: None
        """Called when a pin ended outside of a step: blocks were freed."""
        self.has_unreported = False
        """Whether pins have changed outside of a step, and no step has reported the change yet."""
        self.config = config
        self.blocks_max = int(config.pinned_share * pool.num_blocks)
        """Most blocks that all pins together keep."""
        self._pins = pins
        self._clock = clock or LoopClock()
        self._by_name: dict[str, OperatorPin] = {}  # oldest first
        self._kept: Counter[BlockId] = Counter()  # by how many pins

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[OperatorPin]:
        """Give the pins, the oldest first."""
        return iter(self._by_name.values())

    @property
    def num_kept(self) -> int:
        """Device blocks that pins keep."""
        return len(self._kept)

    def expires_in_s(self, pin: OperatorPin) -> float:
        """Give the seconds until a pin ends."""
        return max(pin.expires_s - self._clock.time(), 0.0)

    def pin(self, name: str, block_hashes: HashArray, ttl_s: float | None) -> int:
        """Keep the resident prefix of a chain, in place of an earlier pin of this name.

        Args:
            name: of the pin.
            block_hashes: (n, 2) uint64 of the prefix's full blocks.
            ttl_s: seconds until the pin ends; None: `retention.ttl_s`.

        Returns:
            how many leading blocks are kept: fewer where they are not resident, or past the quota.

        Raises:
            RequestError: the TTL is longer than `retention.ttl_s_max`, or pins keep no blocks here.
        """
        self.check_pin(ttl_s)
        self.unpin(name)
        block_ids = self._within_quota(self._pins.pin(block_hashes))
        if not block_ids:
            return 0
        self._kept.update(block_ids)
        ttl_s = self.config.ttl_s if ttl_s is None else ttl_s
        timer = self._clock.call_later(ttl_s, partial(self._expire, name))
        self._by_name[name] = OperatorPin(name, block_ids, self._clock.time() + ttl_s, timer)
        return len(block_ids)

    def check_pin(self, ttl_s: float | None) -> None:
        """Refuse a pin that could not be kept, whatever is resident.

        Raises:
            RequestError: as `pin`.
        """
        if ttl_s is not None:
            check_ttl("ttl_s", ttl_s, self.config)
        if not self.blocks_max:
            raise RequestError(
                f"this worker keeps no pinned blocks (retention.pinned_share {self.config.pinned_share:g}); raise it",
                http_status=409,
            )

    def unpin(self, name: str) -> bool:
        """End a pin; False if there is none of this name."""
        is_known = self._end(name)
        if is_known:
            self.has_unreported = True
            self.on_change()
        return is_known

    def give_way(self) -> bool:
        """End the oldest pin, so that a request has room that fits only without pins; False if there is none."""
        oldest = next(iter(self._by_name), None)
        return oldest is not None and self._end(oldest)

    def clear(self) -> None:
        """End all pins: the cache is about to be cleared."""
        while self.give_way():
            pass

    def check(self) -> None:
        """Raise AssertionError if the state is inconsistent."""
        assert len(self._kept) <= self.blocks_max, f"{len(self._kept)} blocks kept: past {self.blocks_max}"
        kept = Counter(block_id for pin in self for block_id in pin.block_ids)
        assert kept == self._kept, "other blocks are kept than counted"
        held = self._pins.holders()
        assert all(held.get(block_id, 0) >= times for block_id, times in kept.items()), (
            "a kept block is not pinned"
        )
        assert all(pin.block_ids and name == pin.name for name, pin in self._by_name.items()), "empty pins"

    def _within_quota(self, block_ids: list[BlockId]) -> list[BlockId]:
        """Unpin the last blocks of a new pin that are past the quota; blocks that other pins keep count once."""
        room, end = self.blocks_max - len(self._kept), 0
        for block_id in block_ids:
            room -= not self._kept[block_id]
            if room < 0:
                break
            end += 1
        self._pins.unpin(block_ids[end:])
        return block_ids[:end]

    def _expire(self, name: str) -> None:
        self.unpin(name)

    def _end(self, name: str) -> bool:
        pin = self._by_name.pop(name, None)
        if pin is None:
            return False
        pin.timer.cancel()
        self._kept -= Counter(pin.block_ids)
        self._pins.unpin(pin.block_ids)
        return True


class KvActions:
    """Acts on one engine's pool and pins. One task owns it."""

    def __init__(self, pool: BlockPool, pins: OperatorPins, clear: Callable[[], None]) -> None:
        """Act on these.

        Args:
            pool: the device's blocks.
            pins: of this pool.
            clear: ends all pins, and clears the cache on all tiers.
        """
        self._pool = pool
        self._pins = pins
        self._clear = clear

    def act(self, action: KvAction) -> KvReport:
        """Act at once.

        Raises:
            RequestError: a value is out of its range, there is no such pin (404), or pins keep nothing here (409).
        """
        match action:
            case KvList():
                return KvReport(pins=tuple(self._describe(pin) for pin in self._pins))
            case KvPin(is_check=True, ttl_s=ttl_s):
                self._pins.check_pin(ttl_s)
                return KvReport()
            case KvPin(name=name, block_hashes=packed, ttl_s=ttl_s):
                return KvReport(blocks=self._pins.pin(name, _hashes(packed), ttl_s))
            case KvUnpin(name=name):
                return KvReport(blocks=self._unpin(name))
            case KvEvict(block_hashes=packed):
                return KvReport(blocks=_discard(self._pool, self._pool.match(_hashes(packed))))
            case KvFlush(tier=tier):
                return KvReport(blocks=self._flush(tier))
            case _:
                assert_never(action)

    def _unpin(self, name: str) -> int:
        """Give the blocks that are kept no more."""
        before = self._pins.num_kept
        if not self._pins.unpin(name):
            raise RequestError(f"there is no pin {name[:100]!r} here", http_status=404, param="name")
        return before - self._pins.num_kept

    def _flush(self, tier: Tier | None) -> int:
        """Give the device blocks that are cached no more; those in use by requests stay if only the device is flushed."""
        before = self._pool.num_cached
        if tier is None:
            self._clear()
        elif tier is Tier.DEVICE:
            self._pins.clear()
            _drop_idle(self._pool, self._pool.idle_blocks())
        else:
            raise RequestError(
                f"tier: must be device, or left out for all tiers, got {tier}: a lower tier is not flushed alone",
                param="tier",
            )
        return before - self._pool.num_cached

    def _describe(self, pin: OperatorPin) -> KvPinned:
        return KvPinned(name=pin.name, blocks=len(set(pin.block_ids)), expires_s=self._pins.expires_in_s(pin))


def _discard(pool: BlockPool, block_ids: Sequence[BlockId]) -> int:
    """Drop idle blocks from the prefix cache and free them; referenced blocks stay.

    Returns:
        how many were dropped.
    """
    idle = [block_id for block_id in dict.fromkeys(block_ids) if pool.count_idle([block_id])]
    _drop_idle(pool, idle)
    return len(idle)


def _drop_idle(pool: BlockPool, idle: Sequence[BlockId]) -> None:
    """Drop blocks from the prefix cache and free them; each is idle, and named once."""
    pool.acquire(idle)
    pool.forget(idle)
    pool.release(idle)


def _hashes(packed: bytes) -> HashArray:
    """Unpack (n, 2) hashes.

    Raises:
        RequestError: there is none, or they are no hashes of 16 bytes.
    """
    if not packed or len(packed) % 16:
        raise RequestError(
            f"block_hashes: must be hashes of 16 bytes, at least one, got {len(packed)} bytes: the prompt must fill a block"
        )
    hashes: HashArray = np.asarray(unpack_hashes(packed)).reshape(-1, 2)
    return hashes
