"""The KV manager of one engine: the loader and the offloader over its tiers."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict

from msgspec.structs import replace

from penstock.core.ids import BlockId
from penstock.core.types.events import AllBlocksCleared, Holder, KvEvent, Tier
from penstock.core.types.instances import KvHolder
from penstock.core.types.load import KvTierCounts
from penstock.core.wire import HashArray
from penstock.kv.groups.groups import KvGroups
from penstock.kv.manager.clock import Clock, LoopClock
from penstock.kv.manager.counters import TierCounters
from penstock.kv.manager.loader import ChosenPrefix, Loader
from penstock.kv.manager.offloader import Offloader
from penstock.kv.manager.prefix_loads import PrefixLoads
from penstock.kv.manager.worth import ComputeSeconds
from penstock.kv.measured import MeasuredPrefill
from penstock.kv.pool.pool import BlockPool
from penstock.kv.windows.prefixes import WindowPrefixes
from penstock.seams.kv import KvRun, KvSource, KvTier


class KvManager:
    """What a scheduler asks of the tiers below its device. Not thread-safe; one task owns it."""

    def __init__(
        self,
        pool: BlockPool,
        tiers: Sequence[KvTier],
        on_change: Callable[[], None],
        *,
        compute_s: ComputeSeconds | None = None,
        clock: Clock | None = None,
        by_chunk: bool = True,
        groups: KvGroups | None = None,
    ) -> None:
        """Manage tiers, which it starts and `close` closes.

        Args:
            pool: the device's blocks.
            tiers: nearest first, at least one.
            on_change: called when `take_arrived` may return more, or blocks were freed.
            compute_s: predicts how long the engine computes; None predicts it from `prefill`.
            clock: times the loads; None is the event loop's.
            by_chunk: whether `take_arrived` tells of chunks, or of a whole prefix alone.
            groups: groups of layers that have blocks of their own in the pool; None: each block has all layers. With groups
                `choose_prefix` takes the place of `choose_runs`, and a prefix arrives as a whole or is of no use.
        """
        self.tiers = tuple(tiers)
        self.prefill = MeasuredPrefill()
        """Seconds per prompt token, which the engine measures."""
        self._pool = pool
        self._on_change = on_change
        self._on_room: Callable[[], None] = lambda: None
        self._cleared: list[Holder] = []
        """Shared holders whose blocks were forgotten since events were taken."""
        self.prefixes = None if groups is None else WindowPrefixes(pool, groups)
        """Finds the device's windows."""
        self._counters: dict[KvSource, TierCounters] = {tier: TierCounters() for tier in tiers}
        clock, compute_s = clock or LoopClock(), compute_s or self._measured_s
        self.prefix_loads = PrefixLoads(
            self.tiers, pool.block_size, compute_s, counters=self._counters, clock=clock
        )
        """Loads of KV transfers."""
        self._loader = Loader(
            pool,
            self.tiers,
            compute_s,
            on_change=self._changed,
            counters=self._counters,
            clock=clock,
            by_chunk=by_chunk and groups is None,
        )
        self._offloader = Offloader(pool, self.tiers, self._changed, self._counters)
        for tier in self.tiers:
            tier.start(self._on_tier_change)
        self.choose_runs = self._loader.choose_runs
        self.is_under_way = self._loader.is_under_way
        self.take_arrived = self._loader.take_arrived
        self.cancel = self._loader.cancel
        self.begin = self._loader.begin
        self.offload = self._offloader.offload

    def choose_prefix(
        self,
        block_hashes: HashArray,
        num_hits: int,
        known_tokens: int,
        ahead: Sequence[tuple[int, int]] = (),
    ) -> ChosenPrefix:
        """Choose what a waiting request of a model with several groups loads; see `Loader.choose_prefix`."""
        assert self.prefixes is not None, "asked without groups"
        return self._loader.choose_prefix(self.prefixes, block_hashes, num_hits, known_tokens, ahead)

    @property
    def num_blocks(self) -> int:
        """Blocks that all tiers can keep."""
        return sum(tier.num_blocks for tier in self.tiers)

    @property
    def num_own(self) -> int:
        """Blocks that the tiers can keep which no other worker loads from."""
        return sum(tier.num_blocks for tier in self.tiers if tier.shared is None)

    @property
    def shared(self) -> tuple[KvHolder, ...]:
        """Whose blocks its shared tiers load."""
        return tuple(tier.shared for tier in self.tiers if tier.shared is not None)

    @property
    def has_arrived(self) -> bool:
        """Whether `take_arrived` may return requests."""
        return self._loader.has_arrived

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt tokens found in each lower `Tier`, host first, as `count` was told."""
        by_tier = {tier.tier: self._counters[tier].hit_tokens for tier in self.tiers}
        return tuple(by_tier.get(tier, 0) for tier in tuple(Tier)[1:])

    @property
    def counts(self) -> tuple[KvTierCounts, ...]:
        """What each tier keeps, and has done since start; nearest first."""
        return tuple(_count(tier, self._counters[tier]) for tier in self.tiers)

    def watch(self, on_room: Callable[[], None]) -> None:
        """Also call `on_room` when blocks were freed."""
        self._on_room = on_room

    def count(self, runs: Sequence[KvRun], prompt_tokens: int) -> None:
        """Count a request's tokens in lower tiers, up to `prompt_tokens`, the prompt tokens that the device lacks."""
        for run in runs:
            found = min(run.num_blocks * self._pool.block_size, prompt_tokens)
            prompt_tokens -= found
            self._counters[run.source].hit_tokens += found

    def count_prefetch(self, runs: Sequence[KvRun]) -> None:
        """Count blocks that are loaded for a request that waits."""
        for run in runs:
            self._counters[run.source].prefetched_blocks += run.num_blocks

    def count_wasted(self, runs: Sequence[KvRun]) -> None:
        """Count prefetched blocks whose request is not admitted with them."""
        for run in runs:
            self._counters[run.source].wasted_blocks += run.num_blocks

    def with_events(self, events: tuple[KvEvent, ...]) -> tuple[KvEvent, ...]:
        """Add the events of all tiers since the last call to those of the device.

        Events of the lowest tier come first, so that a router knows an offloaded block before the device evicts it. If the
        device was cleared, its events come first, since a clearing removes the blocks of all tiers.
        """
        lower: list[KvEvent] = [AllBlocksCleared(holder=holder) for holder in self._cleared]
        self._cleared.clear()
        for tier in reversed(self.tiers):
            told = tier.take_events()
            if self.prefixes is not None:
                self._offloader.note_stored(tier, told)
            lower += _held_by(tier.shared, told)
        is_cleared = any(isinstance(event, AllBlocksCleared) for event in events)
        return (*events, *lower) if is_cleared else (*lower, *events)

    def holders(self) -> Counter[BlockId]:
        """Count its references to each device block."""
        return self._loader.holders() + self._offloader.holders()

    def offloading(self) -> Collection[BlockId]:
        """Return the device blocks that offloads read now."""
        return self._offloader.holders()

    def clear(self) -> None:
        """Forget all blocks of all tiers. The caller clears the device's pool too; its event covers the worker's own tiers."""
        self._offloader.clear()
        for tier in self.tiers:
            tier.clear()
            tier.take_events()
            if tier.shared is not None:
                self._cleared.append(tier.shared.kind)

    def check(self) -> None:
        """Raise AssertionError if a block is held a negative number of times."""
        held = self.holders()
        assert all(number > 0 for number in held.values()), f"blocks held a negative number of times: {held}"

    async def close(self) -> None:
        """Cancel all loads and close the tiers. Safe twice."""
        self._loader.close()
        self._offloader.close()
        for tier in self.tiers:
            await tier.close()

    def _measured_s(self, new_tokens: int, cached_tokens: int) -> float | None:  # noqa: ARG002 - depth is not measured
        return self.prefill.seconds(new_tokens) if self.prefill.is_known else None

    def _on_tier_change(self) -> None:
        self._offloader.go_on()
        self._on_change()

    def _changed(self) -> None:
        self._on_room()
        self._on_change()


def _held_by(holder: KvHolder | None, events: Sequence[KvEvent]) -> Sequence[KvEvent]:
    """Note in a tier's events who holds its blocks."""
    return events if holder is None else [replace(event, holder=holder.kind) for event in events]


def _count(tier: KvTier, counters: TierCounters) -> KvTierCounts:
    return KvTierCounts(
        tier=tier.tier,
        total_blocks=tier.num_blocks,
        cached_blocks=tier.num_cached,
        block_bytes=tier.block_bytes,
        is_off=tier.is_off,
        corrupt_blocks=tier.num_corrupt,
        **asdict(counters),
    )
