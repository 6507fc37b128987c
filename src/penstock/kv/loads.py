"""Loads of prefixes that no running request waits for: KV transfers bring them to reserved blocks, from tiers and a prefill worker."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from penstock.core.clock import Clock, LoopClock, Timer
from penstock.core.ids import BlockId
from penstock.core.log import get_logger
from penstock.core.types.events import Tier
from penstock.core.wire import HashArray
from penstock.kv.load_or_compute import ComputeSeconds
from penstock.seams.kv import KvLoad, KvRun, KvSource, KvTier


@dataclass(slots=True)
class TierCounters:
    """Counts of one tier since start, as `KvTierCounts` has them."""

    hit_tokens: int = 0
    loads: int = 0
    loaded_blocks: int = 0
    load_s: float = 0.0
    saved_s: float = 0.0
    offloaded_blocks: int = 0
    dropped_blocks: int = 0
    late_loads: int = 0
    missing_blocks: int = 0
    prefetched_blocks: int = 0
    wasted_blocks: int = 0


IsWorth = Callable[[KvSource, float, int, int], bool]
"""Says whether loading blocks is sooner than computing them: (source, seconds to load them, number of blocks, blocks before them)."""
_CHUNKS_AHEAD = 2
"""Chunks of a run that load at the same time, so that the source is busy while one is published."""


def always(_source: KvSource, _load_s: float, _num_blocks: int, _num_before: int) -> bool:
    """Say that loading is worth it."""
    return True


def find_runs(
    sources: Sequence[KvSource], block_hashes: HashArray, num_before: int, is_worth: IsWorth = always
) -> list[KvRun]:
    """Find the sources of a prefix's leading blocks.

    The nearest source that has a block brings it, unless another one is known to be quicker.

    Args:
        sources: nearest first.
        block_hashes: (n, 2) uint64, all blocks of the prefix that may be loaded.
        num_before: leading blocks that are not needed.
        is_worth: sources for which this is False are left out.
    """
    runs: list[KvRun] = []
    depth = num_before
    while depth < len(block_hashes):
        run = _run_at(sources, block_hashes, depth, is_worth)
        if run is None:
            break
        runs.append(run)
        depth += run.num_blocks
    return runs


def _run_at(
    sources: Sequence[KvSource], block_hashes: HashArray, depth: int, is_worth: IsWorth
) -> KvRun | None:
    best: KvSource | None = None
    num_blocks, best_s = 0, 0.0
    for source in sources:
        if best is None:
            found = source.locate(block_hashes[depth:])
            if found and is_worth(source, source.load_s(found), found, depth):
                best, num_blocks, best_s = source, found, source.load_s(found)
        elif 0 < source.load_s(num_blocks) < best_s and (found := source.locate(block_hashes[depth:])):
            found = min(found, num_blocks)
            best, num_blocks, best_s = source, found, source.load_s(found)
    return None if best is None else KvRun(best, block_hashes[depth : depth + num_blocks], depth)


def leading_runs(runs: Sequence[KvRun], num_blocks: int) -> list[KvRun]:
    """Cut runs after their first `num_blocks` blocks."""
    leading: list[KvRun] = []
    for run in runs:
        if num_blocks <= 0:
            break
        leading.append(KvRun(run.source, run.block_hashes[:num_blocks], run.num_before))
        num_blocks -= run.num_blocks
    return leading


def following_runs(runs: Sequence[KvRun], num_blocks: int) -> list[KvRun]:
    """Leave out the first `num_blocks` blocks of runs."""
    following: list[KvRun] = []
    for run in runs:
        skipped = min(num_blocks, run.num_blocks)
        num_blocks -= skipped
        if skipped < run.num_blocks:
            following.append(KvRun(run.source, run.block_hashes[skipped:], run.num_before + skipped))
    return following


@dataclass(frozen=True, slots=True)
class Part:
    """What one load of one source brought.

    Attributes:
        source: the source.
        run: index of the run that its blocks belong to.
        num_before: blocks of the prefix before its blocks.
        num_blocks: leading blocks that have arrived.
        seconds: how long it took.
        waited_s: how long after the prefix's begin it ended.
    """

    source: KvSource
    run: int
    num_before: int
    num_blocks: int
    seconds: float
    waited_s: float

    def joined(self, later: "Part") -> "Part":
        """Join it with the part of the same source that follows it."""
        waited_s = max(self.waited_s, later.waited_s)
        begun_s = min(self.waited_s - self.seconds, later.waited_s - later.seconds)
        count = self.num_blocks + later.num_blocks
        return replace(self, num_blocks=count, seconds=waited_s - begun_s, waited_s=waited_s)


@dataclass(slots=True, eq=False)
class _Chunk:
    """A part of a run: blocks from `depth` to `end` of the prefix are missing; `failed` sources are not asked again.

    index: among all chunks of the prefix.
    run: index of its run.
    is_needed: False once a block before this chunk is missing for good.
    """

    index: int
    run: int
    depth: int
    end: int
    failed: set[KvSource] = field(default_factory=set)
    load: KvLoad | None = None
    is_needed: bool = True


class PrefixLoad:
    """The loads of one prefix. Not thread-safe; one task owns it. Its targets are written until `done` is called.

    Attributes:
        runs: as they were planned.
        targets: (n,) device blocks, one for each block of the runs.
        parts: what has ended so far.
        arrived: leading blocks that are complete; their targets are not written any more.
    """

    def __init__(
        self,
        runs: Sequence[KvRun],
        targets: Sequence[BlockId],
        sources: Sequence[KvSource],
        *,
        clock: Clock,
        late_s: float | None = None,
        is_worth: IsWorth = always,
        on_late: Callable[[KvSource], None] = lambda _source: None,
        on_arrived: Callable[["PrefixLoad"], None] = lambda _load: None,
        done: Callable[["PrefixLoad"], None],
    ) -> None:
        """Begin to load.

        Args:
            runs: consecutive, as `find_runs` returns them; at least one.
            targets: (n,) device blocks, reserved until `done` is called.
            sources: nearest first; they are asked for what a run's own source does not bring.
            clock: times the loads.
            late_s: seconds after which what has not arrived is given up; None: the caller cancels.
            is_worth: whether another source is asked, and whether a run goes on after its first chunks.
            on_late: called with each source that has not ended after `late_s`.
            on_arrived: called each time more leading blocks have arrived, and not all loads have ended.
            done: called once, later, after the last write to a target.
        """
        self.runs = tuple(runs)
        self.targets = list(targets)
        self.parts: list[Part] = []
        self.arrived = 0
        self._start = runs[0].num_before
        self._hashes = np.concatenate([run.block_hashes for run in runs])
        self._asked: dict[_Chunk, tuple[KvSource, int, float]] = {}
        """By chunk, while it loads: from where, how many blocks, and since when."""
        self._sources = sources
        self._clock = clock
        self._is_worth = is_worth
        self._on_late_source = on_late
        self._on_arrived = on_arrived
        self._done = done
        self.begun_s = clock.time()
        self._is_stopped = self._is_over = False
        self._timer: Timer | None = None
        self._chunks = list(_split(runs))
        self._first = 0
        """The first chunk that is not complete."""
        self._unbegun = [deque[_Chunk]() for _ in runs]
        for chunk in self._chunks:
            self._unbegun[chunk.run].append(chunk)
        for unbegun, run in zip(self._unbegun, runs, strict=True):
            for chunk in [unbegun.popleft() for _ in range(min(_CHUNKS_AHEAD, len(unbegun)))]:
                self._begin(chunk, run.source, self._missing(chunk))
        if late_s is not None:
            self._timer = clock.call_later(late_s, self._on_late)

    @property
    def num_asked(self) -> int:
        """Leading blocks that have arrived or that a source loads by now."""
        unbegun = [chunks[0].depth for chunks in self._unbegun if chunks]
        return min(unbegun, default=self._start + len(self._hashes)) - self._start

    def cancel(self, *, is_late: bool = False) -> None:
        """Ask all loads to end; `done` is still called. No error if they have ended."""
        self._is_stopped = True
        blamed: set[KvSource] = set()
        for chunk, (source, _, _) in list(self._asked.items()):
            if chunk.load is not None:
                chunk.load.cancel(is_late=is_late and source not in blamed)
                blamed.add(source)

    def results(self) -> list[Part]:
        """Return what has ended so far in prefix order, the chunks that a source brought of one run as one part."""
        results: list[Part] = []
        for part in sorted(self.parts, key=lambda part: part.num_before):
            if results and (results[-1].source, results[-1].run) == (part.source, part.run):
                results[-1] = results[-1].joined(part)
            else:
                results.append(part)
        return results

    def count_used(self, part: Part) -> int:
        """Count the blocks of an ended load that are of use: none after the prefix's first missing block."""
        return max(0, min(part.num_blocks, self._start + self.arrived - part.num_before))

    def _missing(self, chunk: _Chunk) -> HashArray:
        return self._hashes[chunk.depth - self._start : chunk.end - self._start]

    def _begin(self, chunk: _Chunk, source: KvSource, block_hashes: HashArray) -> None:
        start = chunk.depth - self._start
        targets = self.targets[start : start + len(block_hashes)]
        self._asked[chunk] = source, len(block_hashes), self._clock.time()
        try:
            chunk.load = source.load(block_hashes, targets, partial(self._on_done, chunk))
        except Exception:  # noqa: BLE001 - a source that cannot begin brings nothing; its targets must come free all the same
            get_logger().exception("kv_load_failed", effect="other sources are asked, or blocks are computed")
            self._clock.call_later(0, partial(self._on_done, chunk, 0))

    def _on_done(self, chunk: _Chunk, count: int) -> None:
        source, asked, begun_s = self._asked.pop(chunk)
        now_s = self._clock.time()
        waited_s = now_s - self.begun_s
        self.parts.append(Part(source, chunk.run, chunk.depth, count, now_s - begun_s, waited_s))
        chunk.load = None
        chunk.depth += count
        if count < asked:
            chunk.failed.add(source)
        if chunk.depth < chunk.end:
            self._ask(chunk, self._sources)
        if self._unbegun[chunk.run] and chunk not in self._asked:
            self._go_on(chunk.run)
        has_more = self._advance()
        if self._is_over:
            return
        if not self._asked:
            self._end()
        elif has_more:
            self._on_arrived(self)

    def _go_on(self, run: int) -> None:
        """Begin the next chunk of a run, unless the rest of the run is computed sooner by now."""
        chunk, planned = self._unbegun[run].popleft(), self.runs[run]
        source, rest = planned.source, planned.num_before + planned.num_blocks - chunk.depth
        load_s = source.load_s(rest) - source.load_s(0)  # chunks under way come in any case
        if self._is_worth(source, load_s, rest, chunk.depth):
            self._ask(chunk, [source, *self._sources])
        else:
            self._drop(chunk)

    def _ask(self, chunk: _Chunk, sources: Sequence[KvSource]) -> None:
        """Load what a chunk lacks from the first source that has it, or give up what comes from there on."""
        missing = self._missing(chunk)
        planned = self.runs[chunk.run].source
        for source in sources if chunk.is_needed and not self._is_stopped else ():
            found = 0 if source in chunk.failed else source.locate(missing)
            if found and (
                source is planned or self._is_worth(source, source.load_s(found), found, chunk.depth)
            ):
                self._begin(chunk, source, missing[:found])
                return
        self._drop(chunk)

    def _drop(self, chunk: _Chunk) -> None:
        """Cancel the chunks after one that will not be complete: they are of no use."""
        for later in self._chunks[chunk.index + 1 :]:
            later.is_needed = False
            if later.load is not None:
                later.load.cancel()
        for unbegun in self._unbegun[chunk.run :]:
            unbegun.clear()

    def _advance(self) -> bool:
        """Count the leading blocks that have arrived; return whether these are more than before."""
        before = self.arrived
        while self._first < len(self._chunks):
            chunk = self._chunks[self._first]
            self.arrived = chunk.depth - self._start
            if chunk.depth < chunk.end:
                break
            self._first += 1
        return self.arrived > before

    def _end(self) -> None:
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
        self._done(self)

    def _on_late(self) -> None:
        for source in dict.fromkeys(source for source, _, _ in self._asked.values()):
            self._on_late_source(source)
        self.cancel(is_late=True)


def _split(runs: Sequence[KvRun]) -> Iterator[_Chunk]:
    """Split runs into chunks of the size that their sources prefer."""
    index = 0
    for number, run in enumerate(runs):
        end = run.num_before + run.num_blocks
        for depth in range(run.num_before, end, run.source.chunk_blocks):
            yield _Chunk(index, number, depth, min(depth + run.source.chunk_blocks, end))
            index += 1


class PrefixLoads:
    """Chooses between the tiers of an engine and a peer, block by block. One task owns it."""

    def __init__(
        self,
        tiers: Sequence[KvTier] = (),
        block_size: int = 1,
        compute_s: ComputeSeconds = lambda _new_tokens, _cached_tokens: None,
        *,
        counters: Mapping[KvSource, TierCounters] | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Make it without loads.

        Args:
            tiers: of the engine, nearest first; without any, all blocks come from peers.
            block_size: tokens in a block.
            compute_s: predicts how long the engine computes.
            counters: of the tiers.
            clock: times the loads; None is the event loop's.
        """
        self._near = [tier for tier in tiers if tier.tier is Tier.HOST]
        self._far = [tier for tier in tiers if tier.tier is not Tier.HOST]
        self._block_size = block_size
        self._compute_s = compute_s
        self._counters = counters or {}
        self._clock = clock or LoopClock()

    def find(self, block_hashes: HashArray, num_before: int, peer: KvSource) -> list[KvRun]:
        """Find what brings a prefix's blocks soonest, up to the first block that nobody has; tiers slower than computing are left out.

        A peer's blocks are always taken: the router has weighed loading them against computing.

        Args:
            block_hashes: (n, 2) uint64.
            num_before: leading blocks that the device has.
            peer: the prefill worker's blocks.
        """
        return find_runs(self._sources(peer), block_hashes, num_before, partial(self._is_worth, peer))

    def load(
        self,
        runs: Sequence[KvRun],
        targets: Sequence[BlockId],
        peer: KvSource,
        done: Callable[[int], None],
        on_arrived: Callable[[int], None] = lambda _num_blocks: None,
    ) -> KvLoad:
        """Load runs that `find` returned.

        Args:
            runs: at least one.
            targets: a device block for each block, reserved until `done` is called.
            peer: the prefill worker's blocks.
            done: called once, later, with the leading blocks that are complete.
            on_arrived: called before that each time more leading blocks are complete, with their number so far.
        """

        def on_done(load: PrefixLoad) -> None:
            self._count(load)
            done(load.arrived)

        return PrefixLoad(
            runs,
            targets,
            self._sources(peer),
            clock=self._clock,
            is_worth=partial(self._is_worth, peer),
            on_arrived=lambda load: on_arrived(load.arrived),
            done=on_done,
        )

    def _sources(self, peer: KvSource) -> list[KvSource]:
        return [*self._near, peer, *self._far]

    def _is_worth(
        self, peer: KvSource, source: KvSource, load_s: float, num_blocks: int, num_before: int
    ) -> bool:
        if source is peer:
            return True
        compute_s = self._compute_s(num_blocks * self._block_size, num_before * self._block_size)
        return compute_s is None or load_s < compute_s

    def _count(self, load: PrefixLoad) -> None:
        for part in load.results():
            counters = self._counters.get(part.source)
            if counters is not None:
                used = load.count_used(part)
                counters.loads += 1
                counters.loaded_blocks += used
                counters.hit_tokens += used * self._block_size
                counters.load_s += part.seconds
