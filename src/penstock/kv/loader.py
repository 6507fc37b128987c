"""The loader: brings a waiting request's prefix from KV tiers to the device while the batch runs.

Chunks are told as they arrive. A load that fails, is late or meets a corrupt block brings fewer; the request computes the others.
Requests with the same prefix wait for one load. Each has blocks of its own until the load's blocks have arrived and take their
place, so that a load that brings fewer leaves each with room to compute.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from penstock.core.clock import Clock
from penstock.core.ids import BlockId, RequestId
from penstock.core.wire import HashArray
from penstock.kv.load_or_compute import ComputeSeconds, late_after_s, worth_loading
from penstock.kv.loads import PrefixLoad, TierCounters, always, find_runs, following_runs
from penstock.kv.pool import BlockPool
from penstock.kv.windows import WindowPrefixes
from penstock.seams.kv import KvRun, KvSource

_Waiter = TypeVar("_Waiter")
_Work = TypeVar("_Work")


@dataclass(slots=True, eq=False)
class SharedLoad(Generic[_Waiter, _Work]):
    """A load under way.

    Attributes:
        hashes: (n, 2) uint64, of the blocks that it loads.
        num_before: blocks of the prompt before these.
        begun_for: the request that it was begun for.
        waiters: by request; a load for which nobody waits is to be cancelled, and nobody joins it.
        work: what loads, once it has begun.
    """

    hashes: HashArray
    num_before: int
    begun_for: RequestId
    waiters: dict[RequestId, _Waiter] = field(default_factory=dict)
    work: _Work | None = None

    def count_brought(self, block_hashes: HashArray, num_before: int) -> int:
        """Count the leading blocks of `block_hashes`, before which a prompt has `num_before`, that this load brings."""
        start = num_before - self.num_before
        if not self.waiters or not 0 <= start < len(self.hashes):
            return 0
        count = min(len(block_hashes), len(self.hashes) - start)
        is_other = (block_hashes[:count] != self.hashes[start : start + count]).any(axis=1)
        return int(np.argmax(is_other)) if is_other.any() else count


class SharedLoads(Generic[_Waiter, _Work]):
    """The loads of one worker, in the order in which they were begun. One task owns it."""

    def __init__(self) -> None:
        self._loads: dict[SharedLoad[_Waiter, _Work], None] = {}
        self._awaited: dict[RequestId, SharedLoad[_Waiter, _Work]] = {}

    def __len__(self) -> int:
        """Count the loads."""
        return len(self._loads)

    @property
    def num_waiting(self) -> int:
        """Requests that wait."""
        return len(self._awaited)

    def all(self) -> tuple[SharedLoad[_Waiter, _Work], ...]:
        """Return the loads."""
        return tuple(self._loads)

    def find(self, block_hashes: HashArray, num_before: int) -> SharedLoad[_Waiter, _Work] | None:
        """Find a load that brings the first of `block_hashes`, before which a prompt has `num_before` blocks."""
        if not len(block_hashes):
            return None
        return next((load for load in self._loads if load.count_brought(block_hashes[:1], num_before)), None)

    def begin(self, load: SharedLoad[_Waiter, _Work]) -> None:
        """Add a load that begins."""
        self._loads[load] = None

    def join(self, load: SharedLoad[_Waiter, _Work], request_id: RequestId, waiter: _Waiter) -> None:
        """Have a request wait for a load; it waits for no other."""
        assert request_id not in self._awaited, "a request waits for one load"
        load.waiters[request_id] = waiter
        self._awaited[request_id] = load

    def leave(self, request_id: RequestId) -> SharedLoad[_Waiter, _Work] | None:
        """Have a request wait no longer; return the load that it waited for, if there is one."""
        load = self._awaited.pop(request_id, None)
        if load is not None:
            del load.waiters[request_id]
        return load

    def end(self, load: SharedLoad[_Waiter, _Work]) -> dict[RequestId, _Waiter]:
        """Remove a load that has ended, and return who waited for it."""
        del self._loads[load]
        waiters, load.waiters = load.waiters, {}
        for request_id in waiters:
            del self._awaited[request_id]
        return waiters

    def check_idle(self) -> None:
        """Raise AssertionError if a load is left."""
        assert not self._awaited, f"{list(self._awaited)} still wait for loads"
        assert not self._loads, f"{len(self._loads)} loads are under way"


@dataclass(slots=True, eq=False)
class _Prefix:
    """A request's prefix while it loads: by one load at a time, its own or one that it has joined.

    runs:         what is to be loaded of it
    targets:      device blocks for it, which the request holds until others take their place
    block_tokens: tokens that each of its blocks makes available
    is_whole:     whether its blocks are of no use before all have come
    turn_s:       when the engine would begin to compute it
    arrived:      leading blocks that have come
    ready:        of those, what `take_arrived` has not returned
    begin:        blocks that had come when it joined its load
    offset:       which block of the load follows these
    end:          blocks that will have come once its load has brought what it can
    joined_s:     when it joined its load
    is_over:      no more will come
    """

    request_id: RequestId
    runs: Sequence[KvRun]
    targets: list[BlockId]
    block_tokens: float
    is_whole: bool
    turn_s: float
    arrived: int = 0
    ready: list[BlockId] = field(default_factory=list)
    begin: int = 0
    offset: int = 0
    end: int = 0
    joined_s: float = 0.0
    is_over: bool = False


_Load = SharedLoad[_Prefix, PrefixLoad]


class Arrival(NamedTuple):
    """What has arrived of a request's prefix since it was last told: so many more leading blocks. No more come if it `is_over`.

    The request holds `block_ids` from now on, in place of as many of those that `begin` returned.
    """

    request_id: RequestId
    block_ids: Sequence[BlockId]
    is_over: bool

    @property
    def num_blocks(self) -> int:
        """Blocks that have come."""
        return len(self.block_ids)


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
        self._loads: SharedLoads[_Prefix, PrefixLoad] = SharedLoads()
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
        under_way = self._count_under_way(runs)
        best = worth_loading(
            [(run.source, run.num_blocks, run.num_blocks * self._pool.block_size) for run in runs],
            lambda source, num_blocks: source.load_s(max(num_blocks - under_way[source], 0)),
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
        turn_s = self._clock.time() + self._computed_in_s(ahead)
        prefix = _Prefix(request_id, runs, list(targets), block_tokens, is_whole, turn_s)
        self._wanted[request_id] = prefix
        self._load_next(prefix)
        return list(targets)

    def is_under_way(self, request_id: RequestId) -> bool:
        """Say whether a request's prefix is still being loaded, or `take_arrived` has not returned it yet."""
        return request_id in self._wanted

    @property
    def has_arrived(self) -> bool:
        """Whether `take_arrived` may return requests."""
        return bool(self._changed)

    def take_arrived(self) -> list[Arrival]:
        """Return what has arrived since the last call; loads go on for requests whose arrival is not over.

        Blocks that others take the place of are released: the caller forgets them at once.
        """
        changed, self._changed = self._changed, {}
        arrived = []
        for prefix in changed:
            if prefix.is_over:
                del self._wanted[prefix.request_id]
            come, prefix.ready = prefix.ready, []
            start = prefix.arrived - len(come)
            own = prefix.targets[start : prefix.arrived]
            self._unhold(come)
            self._pool.release(own)  # of the two references to a block that stays, one goes
            arrived.append(Arrival(prefix.request_id, come, is_over=prefix.is_over))
        return arrived

    def cancel(self, request_id: RequestId) -> None:
        """Have a request wait no longer, if it does. A load for which nobody waits ends; its targets stay referenced until it has."""
        prefix = self._wanted.pop(request_id, None)
        if prefix is None:
            return
        self._changed.pop(prefix, None)
        self._unhold(prefix.ready)
        self._pool.release(prefix.ready)
        self._leave(request_id)

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

    def _count_under_way(self, runs: Sequence[KvRun]) -> Counter[KvSource]:
        """Count by source the leading blocks of a prefix that a load under way has asked for."""
        counts: Counter[KvSource] = Counter()
        load = self._loads.find(runs[0].block_hashes, runs[0].num_before)
        if load is not None and load.work is not None:
            end = load.num_before + load.work.num_asked
            for run in runs:
                brought = load.count_brought(run.block_hashes, run.num_before)
                counts[run.source] += max(min(brought, end - run.num_before), 0)
        return counts

    def _load_next(self, prefix: _Prefix) -> None:
        """Load the blocks of a prefix that have not come, by a load that is under way or one of its own."""
        runs = following_runs(prefix.runs, prefix.arrived)
        hashes, depth = np.concatenate([run.block_hashes for run in runs]), runs[0].num_before
        prefix.begin, prefix.joined_s = prefix.arrived, self._clock.time()
        # what groups of layers need has other places in the prefixes of others
        load = None if prefix.is_whole else self._loads.find(hashes, depth)
        if load is None:
            prefix.offset, prefix.end = 0, len(prefix.targets)
            self._begin_own(prefix, _Load(hashes, depth, prefix.request_id), runs)
            return
        prefix.offset = depth - load.num_before
        prefix.end = prefix.begin + load.count_brought(hashes, depth)
        self._loads.join(load, prefix.request_id, prefix)
        if load.work is not None:
            self._deliver(load.work, prefix)

    def _begin_own(self, prefix: _Prefix, load: _Load, runs: Sequence[KvRun]) -> None:
        targets = prefix.targets[prefix.begin :]
        self._pool.acquire(targets)
        self._held.update(targets)
        self._loads.begin(load)
        self._loads.join(load, prefix.request_id, prefix)
        load.work = PrefixLoad(
            runs,
            targets,
            self._sources,
            clock=self._clock,
            late_s=late_after_s(sum(run.source.load_s(run.num_blocks) for run in runs)),
            is_worth=always if prefix.is_whole else partial(self._is_sooner, prefix.turn_s),
            on_late=partial(self._on_late, load),
            on_arrived=partial(self._on_arrived, load),
            done=partial(self._on_done, load, prefix.block_tokens),
        )

    def _on_late(self, load: _Load, source: KvSource) -> None:
        self._counters[source].late_loads += bool(load.waiters)

    def _on_arrived(self, load: _Load, work: PrefixLoad) -> None:
        for prefix in tuple(load.waiters.values()):
            self._deliver(work, prefix)
        if self._changed:
            self._on_change()

    def _on_done(self, load: _Load, block_tokens: float, work: PrefixLoad) -> None:
        self._count(load, work, block_tokens)
        for prefix in self._loads.end(load).values():
            self._deliver(work, prefix, is_over=True)
        self._unhold(work.targets)
        self._pool.release(work.targets)
        self._on_change()

    def _deliver(self, work: PrefixLoad, prefix: _Prefix, *, is_over: bool = False) -> None:
        """Give a prefix what has come of its load; once that is all, or the load is over, it goes on with the next one or ends."""
        start = prefix.offset + prefix.arrived - prefix.begin
        come = work.targets[start : min(work.arrived, prefix.offset + prefix.end - prefix.begin)]
        self._pool.acquire(come)
        self._held.update(come)
        prefix.ready += come
        prefix.arrived += len(come)
        if come and self._by_chunk:
            self._changed[prefix] = None
        if prefix.arrived < prefix.end and not is_over:
            return
        if not is_over:
            self._leave(prefix.request_id)
        if prefix.end == prefix.arrived < len(prefix.targets):
            self._load_next(prefix)
        else:
            prefix.is_over = True
            self._changed[prefix] = None

    def _leave(self, request_id: RequestId) -> None:
        """Have a request wait for its load no longer, and cancel the load if nobody does."""
        load = self._loads.leave(request_id)
        if load is not None and not load.waiters and load.work is not None:
            load.work.cancel()

    def _unhold(self, block_ids: Sequence[BlockId]) -> None:
        self._held.subtract(block_ids)
        self._held = +self._held

    def _has(self, name: HashArray) -> bool:
        return any(source.locate(name) for source in self._sources)

    def _count(self, load: _Load, work: PrefixLoad, block_tokens: float) -> None:
        """Count a load that has ended. What follows the first block that did not arrive is of no use."""
        for part in work.results():
            counters = self._counters[part.source]
            counters.loads += 1
            counters.loaded_blocks += work.count_used(part)
            counters.load_s += part.seconds
        for prefix in load.waiters.values():
            self._count_saved(work, prefix, block_tokens)
        missing = len(work.targets) - work.arrived
        if missing and load.waiters:
            lost_at = work.runs[0].num_before + work.arrived
            at = next(run for run in reversed(work.runs) if run.num_before <= lost_at)
            self._counters[at.source].missing_blocks += missing

    def _count_saved(self, work: PrefixLoad, prefix: _Prefix, block_tokens: float) -> None:
        """Count the seconds that a load has saved a request: those of computing, less those for which it waited."""
        waited_s, since_s = 0.0, prefix.joined_s - work.begun_s
        for part in work.results():
            used = work.count_used(part)
            compute_s = self._compute_s(round(used * block_tokens), round(part.num_before * block_tokens))
            if compute_s is not None:
                # loads of one request run side by side
                waits_s = max(0.0, part.waited_s - since_s - waited_s)
                self._counters[part.source].saved_s += (compute_s if used else 0.0) - waits_s
            waited_s = max(waited_s, part.waited_s - since_s)
