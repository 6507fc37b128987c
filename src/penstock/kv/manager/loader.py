"""The loader: brings a waiting request's prefix from KV tiers to the device while the batch runs.

A load that fails, is late or meets a corrupt block brings fewer blocks; the request computes the others.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from penstock.core.ids import BlockId, RequestId
from penstock.core.types.events import Tier
from penstock.core.wire import HashArray
from penstock.kv.manager.clock import Clock, Timer
from penstock.kv.manager.counters import TierCounters
from penstock.kv.manager.worth import ComputeSeconds, late_after_s, worth_loading
from penstock.kv.pool.pool import BlockPool
from penstock.seams.kv import KvLoad, KvTier


@dataclass(frozen=True, slots=True, eq=False)
class KvRun:
    """Consecutive blocks of a prefix that one tier keeps.

    Attributes:
        source: the tier.
        block_hashes: (n, 2) uint64.
        num_before: blocks of the prefix before these.
    """

    source: KvTier
    block_hashes: HashArray
    num_before: int

    @property
    def tier(self) -> Tier:
        """Where the blocks are."""
        return self.source.tier

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return len(self.block_hashes)


@dataclass(slots=True, eq=False)
class _Prefix:
    """A request's loads."""

    request_id: RequestId
    targets: list[BlockId]
    runs: Sequence[KvRun]
    begun_s: float
    loaded: dict[int, int] = field(default_factory=dict)
    """By run: leading blocks that have arrived; missing while it loads."""
    seconds: dict[int, float] = field(default_factory=dict)
    """By run: how long it took."""
    arrived: int = 0
    """Leading blocks that are complete, once all loads have ended."""
    loads: list[KvLoad] = field(default_factory=list)
    is_wanted: bool = True
    deadline: Timer | None = None

    def cancel(self, *, is_late: bool = False) -> None:
        """Ask all loads to end."""
        for load in self.loads:
            load.cancel(is_late=is_late)


class Loader:
    """The loads under way, by request. Not thread-safe; one task owns it.

    Target blocks stay referenced until their tier has stopped writing, so a cancelled load never overwrites another request's KV.
    """

    def __init__(
        self,
        pool: BlockPool,
        sources: Sequence[KvTier],
        compute_s: ComputeSeconds,
        *,
        on_change: Callable[[], None],
        counters: Mapping[Tier, TierCounters],
        clock: Clock,
    ) -> None:
        """Make a loader without loads.

        Args:
            pool: the device's blocks.
            sources: nearest first.
            compute_s: predicts how long the engine computes.
            on_change: called when a prefix has arrived, or blocks were freed.
            counters: what loads are counted in.
            clock: times the loads.
        """
        self._pool = pool
        self._sources = sources
        self._compute_s = compute_s
        self._on_change = on_change
        self._counters = counters
        self._clock = clock
        self._wanted: dict[RequestId, _Prefix] = {}
        self._ended: list[_Prefix] = []
        self._held: Counter[BlockId] = Counter()

    def choose_runs(self, block_hashes: HashArray, hits: Sequence[BlockId], known_tokens: int) -> list[KvRun]:
        """Choose the runs to load for a waiting request: as many as make its prompt ready soonest.

        Args:
            block_hashes: (n, 2) uint64, blocks of the request that may come from a cache.
            hits: leading blocks that the device has.
            known_tokens: all tokens of the request.
        """
        runs: list[KvRun] = []
        depth = len(hits)
        while depth < len(block_hashes):
            for source in self._sources:
                found = source.locate(block_hashes[depth:])
                if found:
                    runs.append(KvRun(source, block_hashes[depth : depth + found], depth))
                    depth += found
                    break
            else:
                break
        return runs[: self._best(runs, known_tokens, len(hits) * self._pool.block_size)] if runs else runs

    def begin(self, request_id: RequestId, runs: Sequence[KvRun]) -> list[BlockId]:
        """Start to load runs that `choose_runs` returned; the device must have enough available blocks.

        Returns:
            device blocks for all runs. The sequence releases them; they are not cached until it commits them.
        """
        targets = self._pool.allocate(sum(run.num_blocks for run in runs))
        assert targets is not None, "begun without room"
        prefix = _Prefix(request_id, targets, runs, self._clock.time())
        self._wanted[request_id] = prefix
        self._pool.acquire(targets)
        self._held.update(targets)
        late_s = late_after_s(sum(run.source.load_s(run.num_blocks) for run in runs))
        start = 0
        for number, run in enumerate(runs):
            end = start + run.num_blocks
            done = partial(self._on_done, prefix, number)
            prefix.loads.append(run.source.load(run.block_hashes, targets[start:end], done))
            start = end
        prefix.deadline = self._clock.call_later(late_s, partial(self._on_late, prefix))
        return list(targets)

    def is_under_way(self, request_id: RequestId) -> bool:
        """Say whether a request's prefix is still being loaded, or `take_arrived` has not returned it yet."""
        return request_id in self._wanted

    @property
    def has_arrived(self) -> bool:
        """Whether `take_arrived` may return requests."""
        return any(prefix.is_wanted for prefix in self._ended)

    def take_arrived(self) -> list[tuple[RequestId, int]]:
        """Return the requests whose loads have ended since the last call, with the number of leading blocks that arrived."""
        ended, self._ended = self._ended, []
        arrived = []
        for prefix in ended:
            if prefix.is_wanted:
                del self._wanted[prefix.request_id]
                arrived.append((prefix.request_id, prefix.arrived))
        return arrived

    def cancel(self, request_id: RequestId) -> None:
        """Cancel a request's loads, if there are any; their targets stay referenced until they have ended."""
        prefix = self._wanted.pop(request_id, None)
        if prefix is not None:
            prefix.is_wanted = False
            prefix.cancel()

    def holders(self) -> Counter[BlockId]:
        """Count its references to each device block."""
        return self._held

    def close(self) -> None:
        """Cancel all loads."""
        for request_id in tuple(self._wanted):
            self.cancel(request_id)

    def _best(self, runs: Sequence[KvRun], known_tokens: int, cached_tokens: int) -> int:
        sources = {source.tier: source for source in self._sources}
        return worth_loading(
            [(run.tier, run.num_blocks) for run in runs],
            lambda tier, num_blocks: sources[tier].load_s(num_blocks),
            self._compute_s,
            known_tokens=known_tokens,
            cached_tokens=cached_tokens,
            block_size=self._pool.block_size,
        )

    def _on_done(self, prefix: _Prefix, run: int, count: int) -> None:
        prefix.loaded[run] = count
        prefix.seconds[run] = self._clock.time() - prefix.begun_s
        if len(prefix.loaded) < len(prefix.runs):
            return
        self._count(prefix)
        if prefix.deadline is not None:
            prefix.deadline.cancel()
        self._held.subtract(prefix.targets)
        self._held = +self._held
        self._pool.release(prefix.targets)
        if prefix.is_wanted:
            self._ended.append(prefix)
        self._on_change()

    def _on_late(self, prefix: _Prefix) -> None:
        if prefix.is_wanted:
            for number, run in enumerate(prefix.runs):
                self._counters[run.tier].late_loads += number not in prefix.loaded
        prefix.cancel(is_late=True)

    def _count(self, prefix: _Prefix) -> None:
        """Count a prefix whose loads have all ended. What follows the first block that did not arrive is of no use."""
        waited_s = 0.0
        is_whole = True
        size = self._pool.block_size
        for number, run in enumerate(prefix.runs):
            counters, seconds = self._counters[run.tier], prefix.seconds[number]
            used = prefix.loaded[number] if is_whole else 0
            prefix.arrived += used
            counters.loads += 1
            counters.loaded_blocks += used
            counters.load_s += seconds
            if not prefix.is_wanted:
                continue
            compute_s = self._compute_s(used * size, run.num_before * size)
            if compute_s is not None:
                # loads of one request run side by side
                counters.saved_s += (compute_s if used else 0.0) - max(0.0, seconds - waited_s)
            waited_s = max(waited_s, seconds)
            if is_whole and used < run.num_blocks:
                is_whole = False
                counters.missing_blocks += len(prefix.targets) - prefix.arrived
