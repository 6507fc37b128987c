"""KV tiers of a simulated engine: their loads take the time of a latency model, and move no bytes."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.core.ids import BlockId
from penstock.core.types.events import KvEvent, Tier
from penstock.core.wire import HashArray
from penstock.kv.manager.clock import LoopClock, Timer
from penstock.kv.manager.manager import KvManager
from penstock.kv.pool.pool import BlockPool
from penstock.kv.pool.prefixes import commit_runs, split_prefix
from penstock.kv.pool.use import BlockUse, EvictionPolicy
from penstock.perf.latency import LatencyModel
from penstock.seams.kv import KvTier
from penstock.sim.engine.timing import Pace

_USE = BlockUse()


class LowerTier(NamedTuple):
    """A tier below a device.

    Attributes:
        tier: where it is.
        num_blocks: how many it keeps.
        eviction: which block a full one evicts first; a block is used when it is stored and at each load.
    """

    tier: Tier
    num_blocks: int
    eviction: EvictionPolicy = "lru"


@dataclass(slots=True, eq=False)
class _Load:
    """A load under way."""

    owner: "TimedTier"
    sources: list[BlockId]
    done: Callable[[int], None]
    timer: asyncio.TimerHandle | None = None

    def cancel(self, *, is_late: bool = False) -> None:  # noqa: ARG002 - none is late
        """End it now."""
        self.owner.end(self, arrived=0)


class TimedTier(KvTier):
    """Loads run one after another at the tier's full bandwidth, while steps run.

    Offloads take no time: they use the other direction of the link, which is rarely full (docs/decisions/0073).
    """

    num_corrupt = 0
    is_off = False
    shared = None

    def __init__(self, kind: LowerTier, latency: LatencyModel, *, block_size: int, pace: Pace) -> None:
        """Make an empty tier.

        Args:
            kind: where it keeps how many blocks.
            latency: gives the time of a load.
            block_size: tokens in a block.
            pace: speed of the host.
        """
        self.tier = kind.tier
        self.num_blocks = kind.num_blocks
        self.pool = BlockPool(kind.num_blocks, block_size, kind.eviction, kind.tier)
        """Its index, for reports and checks."""
        self.block_bytes = round(latency.kv_bytes_per_token * block_size)
        self._block_bytes = latency.kv_bytes_per_token * block_size
        self._latency = latency
        self._pace = pace
        pace.watch(self._on_pace)
        self._loop = asyncio.get_running_loop()
        self._free_at_s = 0.0
        self._loads: set[_Load] = set()
        self._due: list[_Load] = []
        """Loads whose time is over while the host is stopped."""

    @property
    def num_cached(self) -> int:
        """Blocks that it keeps."""
        return self.pool.num_cached

    @property
    def chunk_blocks(self) -> int:
        """All blocks: nothing ends a load early, so that chunks would cost events alone."""
        return self.num_blocks

    @property
    def offload_room(self) -> int:
        """All blocks: offloads take no time."""
        return self.num_blocks

    def probe(self) -> float | None:
        """Return None: `load_s` is exact."""
        return None

    def start(self, on_change: Callable[[], None]) -> None:
        """Do nothing: it changes by loads and offloads alone."""

    def locate(self, block_hashes: HashArray) -> int:
        """Count the leading blocks that it keeps."""
        return len(self.pool.match(block_hashes))

    def load_s(self, num_blocks: int) -> float:
        """Give the seconds until so many blocks are loaded, behind the loads under way."""
        waiting_s = max(self._free_at_s - self._loop.time(), 0.0)
        return waiting_s + self._pace.factor * self._latency.onboard_s(
            num_blocks * self._block_bytes, self.tier
        )

    def load(self, block_hashes: HashArray, targets: Sequence[BlockId], done: Callable[[int], None]) -> _Load:
        """Begin to load leading blocks; all of them arrive."""
        sources = self.pool.match(block_hashes)[: len(targets)]
        self._free_at_s = self._loop.time() + self.load_s(len(sources))
        self.pool.acquire(sources)
        load = _Load(self, sources, done)
        self._loads.add(load)
        load.timer = self._loop.call_at(self._free_at_s, self._on_time, load)
        return load

    def offload(
        self,
        block_hashes: HashArray,
        block_ids: Sequence[BlockId],  # noqa: ARG002 - there are no bytes to copy
        done: Callable[[Sequence[BlockId]], None],  # noqa: ARG002 - it reads none
    ) -> Sequence[BlockId]:
        """Keep the missing blocks of a prefix at once."""
        held, missing = split_prefix(self.pool, block_hashes)
        self.pool.acquire(held)
        missing = missing[: self.pool.num_available]
        taken = self.pool.allocate(len(missing)) if missing else None
        self.pool.release(held)  # as the newest, and not evicted for their own children
        if taken:
            commit_runs(self.pool, block_hashes, missing, taken)
            self.pool.release(taken, _USE)
        return ()

    def take_events(self) -> tuple[KvEvent, ...]:
        """Return the KV events since the last call, in order."""
        return self.pool.take_events()

    def clear(self) -> None:
        """Forget all blocks."""
        self.pool.reset()

    async def close(self) -> None:
        """End all loads."""
        for load in tuple(self._loads):
            self.end(load, arrived=0)

    def end(self, load: _Load, *, arrived: int) -> None:
        """End a load, unless it has ended; the link stays busy until the time that it would have taken."""
        if load not in self._loads:
            return
        self._loads.discard(load)
        if load.timer is not None:
            load.timer.cancel()
        self.pool.release(load.sources, _USE)
        load.done(arrived)

    def _on_time(self, load: _Load) -> None:
        if self._pace.is_going:
            self.end(load, arrived=len(load.sources))
        else:
            self._due.append(load)

    def _on_pace(self) -> None:
        if self._pace.is_going:
            due, self._due = self._due, []
            for load in due:
                self.end(load, arrived=len(load.sources))


class _NeverLate(LoopClock):
    """The loop's clock without timers."""

    def call_later(self, delay: float, callback: Callable[[], None], /) -> Timer:  # noqa: ARG002
        return self

    def cancel(self) -> None:
        """Do nothing."""


def timed_kv_manager(
    pool: BlockPool,
    lower_tiers: Sequence[LowerTier],
    latency: LatencyModel,
    pace: Pace,
    on_change: Callable[[], None],
) -> KvManager | None:
    """Make the KV manager of a simulated engine; None without lower tiers.

    Its loads are never late: they take the predicted time, or longer while the host is stopped. Each is told as a whole, which is
    all that the native scheduler knows.

    Args:
        pool: the device's blocks.
        lower_tiers: the tiers below, nearest first.
        latency: gives the time of loads and of computing.
        pace: speed of the host.
        on_change: called when a prefix has arrived, or blocks were freed.
    """
    if not lower_tiers:
        return None
    tiers = [TimedTier(kind, latency, block_size=pool.block_size, pace=pace) for kind in lower_tiers]
    return KvManager(
        pool,
        tiers,
        on_change,
        compute_s=lambda new, cached: pace.factor * latency.prefill_s(new, cached),
        clock=_NeverLate(),
        by_chunk=False,
    )
