"""Loads consecutive blocks of one prefix from whatever sources have them.

Runs load side by side. What a source fails to bring, the next source that has it brings; the rest is the caller's to compute.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from penstock.core.ids import BlockId
from penstock.core.log import get_logger
from penstock.core.wire import HashArray
from penstock.kv.manager.clock import Clock, Timer
from penstock.seams.kv import KvLoad, KvRun, KvSource

IsWorth = Callable[[KvSource, int, int], bool]
"""Says whether loading so many blocks, after so many blocks of the prefix, from a source is sooner than computing them."""


def _always(_source: KvSource, _num_blocks: int, _num_before: int) -> bool:
    return True


def find_runs(
    sources: Sequence[KvSource], block_hashes: HashArray, num_before: int, is_worth: IsWorth = _always
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
            if found and is_worth(source, found, depth):
                best, num_blocks, best_s = source, found, source.load_s(found)
        elif 0 < source.load_s(num_blocks) < best_s and (found := source.locate(block_hashes[depth:])):
            found = min(found, num_blocks)
            best, num_blocks, best_s = source, found, source.load_s(found)
    return None if best is None else KvRun(best, block_hashes[depth : depth + num_blocks], depth)


@dataclass(frozen=True, slots=True)
class Part:
    """What one load of one source brought.

    Attributes:
        source: the source.
        num_before: blocks of the prefix before its blocks.
        num_blocks: leading blocks that have arrived.
        seconds: how long it took.
        waited_s: how long after the prefix's begin it ended.
    """

    source: KvSource
    num_before: int
    num_blocks: int
    seconds: float
    waited_s: float


@dataclass(slots=True, eq=False)
class _Run:
    """One run: blocks from `depth` to `end` of the prefix are missing; `failed` sources are not asked again.

    is_needed: False once a block before this run is missing for good.
    """

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
        arrived: leading blocks that are complete, once all has ended.
    """

    def __init__(
        self,
        runs: Sequence[KvRun],
        targets: Sequence[BlockId],
        sources: Sequence[KvSource],
        *,
        clock: Clock,
        late_s: float | None = None,
        is_worth: IsWorth = _always,
        on_late: Callable[[KvSource], None] = lambda _source: None,
        done: Callable[["PrefixLoad"], None],
    ) -> None:
        """Begin to load.

        Args:
            runs: consecutive, as `find_runs` returns them; at least one.
            targets: (n,) device blocks, reserved until `done` is called.
            sources: nearest first; they are asked for what a run's own source does not bring.
            clock: times the loads.
            late_s: seconds after which what has not arrived is given up; None: the caller cancels.
            is_worth: whether another source is asked.
            on_late: called with each source that has not ended after `late_s`.
            done: called once, later, after the last write to a target.
        """
        self.runs = tuple(runs)
        self.targets = list(targets)
        self.parts: list[Part] = []
        self.arrived = 0
        self._asked: dict[_Run, tuple[KvSource, int, float]] = {}
        """By run, while it loads: from where, how many blocks, and since when."""
        self._sources = sources
        self._clock = clock
        self._is_worth = is_worth
        self._on_late_source = on_late
        self._done = done
        self._begun_s = clock.time()
        self._is_stopped = self._is_over = False
        self._timer: Timer | None = None
        self._loading = [_Run(run.num_before, run.num_before + run.num_blocks) for run in runs]
        for state, run in zip(self._loading, runs, strict=True):
            self._begin(state, run.source, run.block_hashes)
        if late_s is not None:
            self._timer = clock.call_later(late_s, self._on_late)

    def cancel(self, *, is_late: bool = False) -> None:
        """Ask all loads to end; `done` is still called. No error if they have ended."""
        self._is_stopped = True
        for run in self._loading:
            if run.load is not None:
                run.load.cancel(is_late=is_late)

    def count_used(self, part: Part) -> int:
        """Count the blocks of an ended load that are of use: none after the prefix's first missing block."""
        end = self.runs[0].num_before + self.arrived
        return max(0, min(part.num_blocks, end - part.num_before))

    def _begin(self, run: _Run, source: KvSource, block_hashes: HashArray) -> None:
        start = run.depth - self.runs[0].num_before
        targets = self.targets[start : start + len(block_hashes)]
        self._asked[run] = source, len(block_hashes), self._clock.time()
        try:
            run.load = source.load(block_hashes, targets, partial(self._on_done, run))
        except Exception:  # noqa: BLE001 - a source that cannot begin brings nothing; its targets must come free all the same
            get_logger().exception("kv_load_failed", effect="other sources are asked, or blocks are computed")
            self._clock.call_later(0, partial(self._on_done, run, 0))

    def _on_done(self, run: _Run, count: int) -> None:
        source, asked, begun_s = self._asked.pop(run)
        now_s = self._clock.time()
        self.parts.append(Part(source, run.depth, count, now_s - begun_s, now_s - self._begun_s))
        run.load = None
        run.depth += count
        if count < asked:
            run.failed.add(source)
        if run.depth < run.end:
            if run.is_needed and not self._is_stopped:
                self._ask_another(run)
            if run.load is None:
                self._drop_after(run)
        if not self._asked and not self._is_over:
            self._end()

    def _ask_another(self, run: _Run) -> None:
        planned = self.runs[self._loading.index(run)]
        missing = planned.block_hashes[run.depth - planned.num_before :]
        for source in self._sources:
            if source in run.failed:
                continue
            found = source.locate(missing)
            if found and self._is_worth(source, found, run.depth):
                self._begin(run, source, missing[:found])
                return

    def _drop_after(self, run: _Run) -> None:
        """Cancel the runs after one that has ended without all its blocks: they are of no use."""
        for later in self._loading[self._loading.index(run) + 1 :]:
            later.is_needed = False
            if later.load is not None:
                later.load.cancel()

    def _end(self) -> None:
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
        for run in self._loading:
            self.arrived = run.depth - self.runs[0].num_before
            if run.depth < run.end:
                break
        self._done(self)

    def _on_late(self) -> None:
        for source, _, _ in self._asked.values():
            self._on_late_source(source)
        self.cancel(is_late=True)
