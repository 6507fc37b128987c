"""The loader: brings a waiting request's prefix from KV tiers to the device while the batch runs.

Chunks are told as they arrive. A load that fails, is late or meets a corrupt block brings fewer; the request computes the others.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from penstock.core.ids import BlockId, RequestId
from penstock.core.wire import HashArray
from penstock.kv.manager.clock import Clock
from penstock.kv.manager.counters import TierCounters
from penstock.kv.manager.prefix_load import PrefixLoad, always, find_runs
from penstock.kv.manager.worth import ComputeSeconds, late_after_s, worth_loading
from penstock.kv.pool.pool import BlockPool
from penstock.kv.windows.prefixes import WindowPrefixes
from penstock.seams.kv import KvRun, KvSource


@dataclass(slots=True, eq=False)
class _Prefix:
    """A request's prefix while it loads.

    is_wanted: False once the request has left.
    load: None until it has begun.
    told: blocks that `take_arrived` has returned.
    is_over: whether all its loads have ended.
    block_tokens: tokens that each of its blocks makes available.
    """

    request_id: RequestId
    block_tokens: float
    is_wanted: bool = True
    load: PrefixLoad | None = None
    told: int = 0
    is_over: bool = False


class Arrival(NamedTuple):
    """What has arrived of a request's prefix since it was last told: so many more leading blocks. No more come if it `is_over`."""

    request_id: RequestId
    num_blocks: int
    is_over: bool


class ChosenPrefix(NamedTuple):
    """The prefix that a request of a model with several groups of layers goes on after.

    end:       its length in blocks
    runs:      what is loaded of it, all or nothing; empty if the device has all
    num_found: leading blocks of the first group that the device or a tier has, at least `end`
    """

    end: int
    runs: Sequence[KvRun]
    num_found: int


class Loader:
    """The loads under way, by request. Not thread-safe; one task owns it.

    Target blocks stay referenced until their tier has stopped writing, so a cancelled load never overwrites another request's KV.
    """

    def __init__(
        self,
        pool: BlockPool,
        sources: Sequence[KvSource],
        compute_s: ComputeSeconds,
        *,
        on_change: Callable[[], None],
        counters: Mapping[KvSource, TierCounters],
        clock: Clock,
        by_chunk: bool = True,
    ) -> None:
        """Make a loader without loads.

        Args:
            pool: the device's blocks.
            sources: nearest first.
            compute_s: predicts how long the engine computes.
            on_change: called when a prefix has arrived, or blocks were freed.
            counters: what loads are counted in.
            clock: times the loads.
            by_chunk: whether chunks are told before all of a prefix has arrived.
        """
        self._pool = pool
        self._sources = sources
        self._compute_s = compute_s
        self._on_change = on_change
        self._counters = counters
        self._clock = clock
        self._wanted: dict[RequestId, _Prefix] = {}
        self._by_chunk = by_chunk
        self._changed: dict[_Prefix, None] = {}
        """Of which more has arrived than was told, or that are over."""
        self._held: Counter[BlockId] = Counter()

    def choose_runs(
        self,
        block_hashes: HashArray,
        hits: Sequence[BlockId],
        known_tokens: int,
        ahead: Sequence[tuple[int, int]] = (),
    ) -> list[KvRun]:
        """Choose the runs to load for a waiting request: as many as make its prompt ready soonest.

        Args:
            block_hashes: (n, 2) uint64, blocks of the request that may come from a cache.
            hits: leading blocks that the device has.
            known_tokens: all tokens of the request.
            ahead: what the engine computes before, as (tokens, tokens before them).
        """
        runs = find_runs(self._sources, block_hashes, len(hits))
        if not runs:
            return runs
        best = worth_loading(
            [(run.source, run.num_blocks, run.num_blocks * self._pool.block_size) for run in runs],
            lambda source, num_blocks: source.load_s(num_blocks),
            self._compute_s,
            known_tokens=known_tokens,
            cached_tokens=len(hits) * self._pool.block_size,
            wait_s=self._computed_in_s(ahead),
        )
        return runs[:best]

    def choose_prefix(
        self,
        prefixes: WindowPrefixes,
        block_hashes: HashArray,
        num_hits: int,
        known_tokens: int,
        ahead: Sequence[tuple[int, int]] = (),
    ) -> ChosenPrefix:
        """Choose what a waiting request of a model with windows loads: the longest prefix that is held in all groups, if that is sooner.

        Args:
            prefixes: find the device's windows.
            block_hashes: (n, 2) uint64, blocks of the request that may come from a cache.
            num_hits: leading blocks that the device has of the first group.
            known_tokens: all tokens of the request.
            ahead: what the engine computes before, as (tokens, tokens before them).
        """
        found = num_hits + sum(run.num_blocks for run in find_runs(self._sources, block_hashes, num_hits))
        here = prefixes.longest(block_hashes, num_hits)
        end = prefixes.longest(block_hashes, found, self._has) if self._sources else here
        if end > here:
            names = prefixes.names(block_hashes, end, min(num_hits, end))
            runs = find_runs(self._sources, names, 0)
            if sum(run.num_blocks for run in runs) == len(names):
                size = self._pool.block_size
                tokens = [0] * (len(runs) - 1) + [(end - here) * size]
                best = worth_loading(
                    [(run.source, run.num_blocks, each) for run, each in zip(runs, tokens, strict=True)],
                    lambda source, num_blocks: source.load_s(num_blocks),
                    self._compute_s,
                    known_tokens=known_tokens,
                    cached_tokens=here * size,
                    wait_s=self._computed_in_s(ahead),
                )
                if best == len(runs):
                    return ChosenPrefix(end, runs, found)
        return ChosenPrefix(here, (), found)

    def begin(
        self,
        request_id: RequestId,
        runs: Sequence[KvRun],
        ahead: Sequence[tuple[int, int]] = (),
        *,
        whole_tokens: int | None = None,
    ) -> list[BlockId]:
        """Start to load runs that `choose_runs` or `choose_prefix` returned; the device must have enough available blocks.

        Args:
            request_id: the request.
            runs: at least one.
            ahead: as `choose_runs` was told.
            whole_tokens: tokens that the runs make available if all of them arrive, and no part of them before; None: each
                block those of a block.

        Returns:
            device blocks for all runs. The sequence releases them; they are not cached until it commits them.
        """
        targets = self._pool.allocate(sum(run.num_blocks for run in runs))
        assert targets is not None, "begun without room"
        is_whole = whole_tokens is not None
        block_tokens = whole_tokens / len(targets) if whole_tokens is not None else self._pool.block_size
        prefix = self._wanted[request_id] = _Prefix(request_id, block_tokens)
        self._pool.acquire(targets)
        self._held.update(targets)
        prefix.load = PrefixLoad(
            runs,
            targets,
            self._sources,
            clock=self._clock,
            late_s=late_after_s(sum(run.source.load_s(run.num_blocks) for run in runs)),
            is_worth=always
            if is_whole
            else partial(self._is_sooner, self._clock.time() + self._computed_in_s(ahead)),
            on_late=partial(self._on_late, prefix),
            on_arrived=partial(self._on_arrived, prefix),
            done=partial(self._on_done, prefix),
        )
        return list(targets)

    def is_under_way(self, request_id: RequestId) -> bool:
        """Say whether a request's prefix is still being loaded, or `take_arrived` has not returned it yet."""
        return request_id in self._wanted

    @property
    def has_arrived(self) -> bool:
        """Whether `take_arrived` may return requests."""
        return any(prefix.is_wanted for prefix in self._changed)

    def take_arrived(self) -> list[Arrival]:
        """Return what has arrived since the last call; loads go on for requests whose arrival is not over."""
        changed, self._changed = self._changed, {}
        arrived = []
        for prefix in changed:
            if prefix.is_wanted and prefix.load is not None:
                if prefix.is_over:
                    del self._wanted[prefix.request_id]
                arrived.append(
                    Arrival(prefix.request_id, prefix.load.arrived - prefix.told, is_over=prefix.is_over)
                )
                prefix.told = prefix.load.arrived
        return arrived

    def cancel(self, request_id: RequestId) -> None:
        """Cancel a request's loads, if there are any; their targets stay referenced until they have ended."""
        prefix = self._wanted.pop(request_id, None)
        if prefix is not None:
            prefix.is_wanted = False
            self._changed.pop(prefix, None)
            if prefix.load is not None:
                prefix.load.cancel()

    def holders(self) -> Counter[BlockId]:
        """Count its references to each device block."""
        return self._held

    def close(self) -> None:
        """Cancel all loads."""
        for request_id in tuple(self._wanted):
            self.cancel(request_id)

    def _computed_in_s(self, prompts: Sequence[tuple[int, int]]) -> float:
        """Predict the seconds until the engine has computed prompts, as (tokens, tokens before them)."""
        return sum(self._compute_s(*each) or 0.0 for each in prompts)

    def _is_sooner(
        self, turn_s: float, _source: KvSource, load_s: float, num_blocks: int, num_before: int
    ) -> bool:
        """Say whether loading blocks is predicted to be sooner than computing them after `turn_s`, or is not known to be later."""
        size = self._pool.block_size
        compute_s = self._compute_s(num_blocks * size, num_before * size)
        return compute_s is None or load_s < max(turn_s - self._clock.time(), 0.0) + compute_s

    def _on_late(self, prefix: _Prefix, source: KvSource) -> None:
        self._counters[source].late_loads += prefix.is_wanted

    def _on_arrived(self, prefix: _Prefix, _load: PrefixLoad) -> None:
        if prefix.is_wanted and self._by_chunk:
            self._changed[prefix] = None
            self._on_change()

    def _on_done(self, prefix: _Prefix, load: PrefixLoad) -> None:
        self._count(load, prefix)
        self._held.subtract(load.targets)
        self._held = +self._held
        self._pool.release(load.targets)
        prefix.is_over = True
        if prefix.is_wanted:
            self._changed[prefix] = None
        self._on_change()

    def _has(self, name: HashArray) -> bool:
        return any(source.locate(name) for source in self._sources)

    def _count(self, load: PrefixLoad, prefix: _Prefix) -> None:
        """Count a prefix whose loads have all ended. What follows the first block that did not arrive is of no use."""
        waited_s = 0.0
        each, is_wanted = prefix.block_tokens, prefix.is_wanted
        for part in load.results():
            counters = self._counters[part.source]
            used = load.count_used(part)
            counters.loads += 1
            counters.loaded_blocks += used
            counters.load_s += part.seconds
            if not is_wanted:
                continue
            compute_s = self._compute_s(round(used * each), round(part.num_before * each))
            if compute_s is not None:
                # loads of one request run side by side
                counters.saved_s += (compute_s if used else 0.0) - max(0.0, part.waited_s - waited_s)
            waited_s = max(waited_s, part.waited_s)
        if not is_wanted:
            return
        missing = len(load.targets) - load.arrived
        if missing:
            lost_at = load.runs[0].num_before + load.arrived
            at = next(run for run in reversed(load.runs) if run.num_before <= lost_at)
            self._counters[at.source].missing_blocks += missing
