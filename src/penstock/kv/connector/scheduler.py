"""The scheduler's side: what the tiers have of a prompt, which blocks are loaded, and which are offloaded.

The device processes are the truth. This side knows what they reported with the steps so far. A block that was evicted since
then is missing from its load, and computed.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import msgspec

from penstock.core.types.events import KvEvent, Tier
from penstock.core.types.load import KvTierCounts
from penstock.core.wire import HashArray
from penstock.kv.connector.mirror import TierMirror
from penstock.kv.connector.orders import Loaded, LoadOrder, LoadRun, Orders, Report
from penstock.kv.connector.saves import DeviceCache, Saves
from penstock.kv.manager.counters import TierCounters
from penstock.kv.manager.worth import worth_loading
from penstock.kv.measured import LOAD_HALF_LIFE_S, MeasuredSpeed

_QUICK_S = 0.01
"""A step may wait so long for loads from the host: a load beside the steps is heard of one or two steps later."""
_LINGER_S = 1.0
"""Steps are asked for so long after the last order, so that events are told although no request comes."""


@dataclass(frozen=True, slots=True)
class _Run:
    tier: Tier
    start: int
    end: int


@dataclass(slots=True, eq=False)
class _Match:
    """What `match` found: runs of blocks of the prefix, numbered from its first block."""

    block_hashes: HashArray
    runs: list[_Run]


@dataclass(slots=True, eq=False)
class _Load:
    """A load under way in all device processes."""

    request_id: str
    runs: list[_Run]
    hashes: list[int]
    begun_s: float
    by_rank: dict[int, Loaded] = field(default_factory=dict)
    is_wanted: bool = True


class KvConnectorScheduler:
    """Matches, reserves and commits. Not thread-safe; the engine's scheduler owns it.

    A request is matched, and may be matched again until its device blocks are allocated; `reserve` then orders the load.
    `commit` orders that a request's complete blocks are offloaded.
    """

    def __init__(
        self,
        device: DeviceCache,
        *,
        block_size: int,
        num_blocks: int,
        num_ranks: int = 1,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """Begin before the device processes have reported.

        Args:
            device: holds device blocks while they are copied.
            block_size: tokens in a block.
            num_blocks: of the device.
            num_ranks: device processes, each of which keeps its part of every block.
            clock: seconds.
        """
        self.prefill = MeasuredSpeed()
        """Seconds for each prompt token; the engine measures it."""
        self._block_size = block_size
        self._num_ranks = num_ranks
        self._clock = clock
        self._mirror = TierMirror(num_ranks)
        self._reports: dict[int, Report] = {}
        """The latest of each process."""
        self._counters: dict[Tier, TierCounters] = {}
        self._speeds: dict[Tier, MeasuredSpeed] = {}
        self._waiting: Counter[Tier] = Counter()
        """Blocks of loads under way."""
        self._matches: dict[str, _Match] = {}
        self._loads: dict[int, _Load] = {}
        self._load_of: dict[str, int] = {}
        self._loading: set[int] = set()
        """First block of each load under way."""
        self._failed: set[str] = set()
        """Requests that compute what a load did not bring, and load nothing more."""
        self._saves = Saves(device, self._mirror, pinned_max=max(1, num_blocks // 8))
        self._orders: list[LoadOrder] = []
        self._cancelled: list[int] = []
        self._is_clearing = False
        self._next_id = 0
        self._events: list[KvEvent] = []
        self._ordered_s = clock()

    # -- requests

    def match(
        self, request_id: str, block_hashes: HashArray, num_cached: int, known_tokens: int
    ) -> int | None:
        """Count the blocks to load for a waiting request, after those that the device has.

        Args:
            request_id: of the request.
            block_hashes: (n, 2) uint64, the blocks of its prompt that may come from a cache.
            num_cached: leading blocks that the device has.
            known_tokens: all tokens of the request.

        Returns:
            as many as are predicted to be loaded sooner than computed; None while they are loaded for another request: ask
            again, the device may have them then.
        """
        self._matches.pop(request_id, None)
        if request_id in self._failed or num_cached >= len(block_hashes):
            return 0
        if int(block_hashes[num_cached, 0]) in self._loading:
            return None
        runs = self._runs(block_hashes, num_cached)
        count = worth_loading(
            [(run.tier, run.end - run.start) for run in runs],
            lambda tier, blocks: self._speeds[tier].seconds(self._waiting[tier] + blocks),
            self._compute_s,
            known_tokens=known_tokens,
            cached_tokens=num_cached * self._block_size,
            block_size=self._block_size,
        )
        if not count:
            return 0
        self._matches[request_id] = _Match(block_hashes, runs[:count])
        return runs[count - 1].end - num_cached

    def is_quick(self, request_id: str) -> bool:
        """Say whether the load that `match` found is predicted so short that the next step may wait for it."""
        runs = self._matches[request_id].runs
        if any(run.tier is not Tier.HOST for run in runs) or not self._speeds[Tier.HOST].is_known:
            return False
        blocks = self._waiting[Tier.HOST] + sum(run.end - run.start for run in runs)
        return self._speeds[Tier.HOST].seconds(blocks) <= _QUICK_S

    def reserve(
        self, request_id: str, block_ids: Sequence[int], num_blocks: int, *, is_awaited: bool = False
    ) -> None:
        """Order the load that `match` found.

        Args:
            request_id: of the request.
            block_ids: its device blocks, from the first one on. Those that are loaded stay the load's until it has ended in
                all processes.
            num_blocks: as many as `match` returned, or fewer.
            is_awaited: the next step waits for it.
        """
        match = self._matches.pop(request_id)
        start = match.runs[0].start
        targets = block_ids[start : start + num_blocks]
        runs = [
            _Run(run.tier, run.start, min(run.end, start + len(targets)))
            for run in match.runs
            if run.start < start + len(targets)
        ]
        hashes = match.block_hashes
        self._next_id += 1
        orders = []
        for run in runs:
            blocks = run.end - run.start
            self._waiting[run.tier] += blocks
            self._counters[run.tier].hit_tokens += blocks * self._block_size
            orders.append(
                LoadRun(
                    run.tier, hashes[run.start : run.end], list(targets[run.start - start : run.end - start])
                )
            )
        names = hashes[start : start + len(targets), 0].tolist()
        self._loads[self._next_id] = _Load(request_id, runs, names, self._clock())
        self._load_of[request_id] = self._next_id
        self._loading.add(names[0])
        self._orders.append(LoadOrder(self._next_id, request_id, tuple(orders), is_awaited))

    def is_loading(self, request_id: str) -> bool:
        """Say whether a request's load is under way."""
        return request_id in self._load_of

    def commit(self, block_hashes: HashArray, keys: Sequence[Any]) -> None:
        """Have complete blocks offloaded.

        Args:
            block_hashes: (n, 2) uint64, of a prefix from its first block on.
            keys: (n,) what `DeviceCache.pin` finds these blocks by.
        """
        self._saves.add(block_hashes, keys)

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended; its load, if one is under way, is cancelled."""
        self._matches.pop(request_id, None)
        self._failed.discard(request_id)
        load_id = self._load_of.pop(request_id, None)
        if load_id is not None:
            self._loads[load_id].is_wanted = False
            self._cancelled.append(load_id)

    # -- steps

    def take_orders(self) -> Orders:
        """Return what the device processes begin now; each gets the same."""
        saves = self._saves.take()
        for save in saves:
            for tier, counters in self._counters.items():
                kept = self._mirror.locate(tier, save.block_hashes)
                counters.offloaded_blocks += len(save.block_hashes) - max(kept, save.start)
        orders = Orders(tuple(self._orders), tuple(self._cancelled), saves, self._is_clearing)
        if orders.loads or saves or self._is_clearing:
            self._ordered_s = self._clock()
        self._orders, self._cancelled, self._is_clearing = [], [], False
        return orders

    def take_reports(self, reports: Mapping[int, Report]) -> None:
        """Note what device processes have done, by their number."""
        for rank, report in reports.items():
            self._events += self._mirror.apply(rank, report.events)
            self._reports[rank] = report
            for counts in report.tiers:
                self._counters.setdefault(counts.tier, TierCounters())
                speed = MeasuredSpeed(half_life_s=LOAD_HALF_LIFE_S, clock=self._clock)
                self._speeds.setdefault(counts.tier, speed)
            for loaded in report.loaded:
                self._note(rank, loaded)
            for save_id in report.saved:
                self._saves.note(save_id, self._num_ranks)
        self._saves.tiers = tuple(self._counters)
        dropped = self._saves.take_dropped()
        for counters in self._counters.values():
            counters.dropped_blocks += dropped

    def clear(self) -> None:
        """Have all tiers forget their blocks."""
        self._saves.clear()
        self._matches.clear()
        self._is_clearing = True

    @property
    def needs_steps(self) -> bool:
        """Whether steps are needed though no request is there: to begin what was ordered, and to hear what was done."""
        if len(self._reports) < self._num_ranks or self._loads or self._orders or self._is_clearing:
            return True
        if self._saves.is_pending:
            return True
        is_busy = any(report.is_busy for report in self._reports.values())
        return is_busy and self._clock() - self._ordered_s < _LINGER_S

    @property
    def has_pinned(self) -> bool:
        """Whether device blocks will be free once they were copied."""
        return self._saves.has_pinned

    def take_events(self) -> list[KvEvent]:
        """Return the KV events of all device processes together since the last call."""
        events, self._events = self._events, []
        return events

    def counts(self) -> tuple[KvTierCounts, ...]:
        """Return what each tier keeps and has done since start, nearest first; empty before all processes have reported."""
        if len(self._reports) < self._num_ranks:
            return ()
        by_tier = [[report.tiers[n] for report in self._reports.values()] for n in range(len(self._counters))]
        return tuple(
            msgspec.structs.replace(
                ranks[0],
                cached_blocks=min(each.cached_blocks for each in ranks),
                block_bytes=sum(each.block_bytes for each in ranks),
                is_off=any(each.is_off for each in ranks),
                corrupt_blocks=sum(each.corrupt_blocks for each in ranks),
                **self._counted(ranks[0].tier, max(each.dropped_blocks for each in ranks)),
            )
            for ranks in by_tier
        )

    def _counted(self, tier: Tier, not_taken: int) -> dict[str, Any]:
        """Return what this side counts of a tier; blocks that the tier did not take were dropped, and not offloaded."""
        counters = self._counters[tier]
        counted = {name: getattr(counters, name) for name in _COUNTED}
        counted["offloaded_blocks"] = max(counters.offloaded_blocks - not_taken, 0)
        counted["dropped_blocks"] += not_taken
        return counted

    def check(self) -> None:
        """Raise AssertionError if blocks are held although nothing is under way."""
        assert self._loads.keys() >= set(self._load_of.values()), "a request's load is under way"
        assert self._loads or not +self._waiting, f"blocks wait for no load: {self._waiting}"
        assert len(self._loading) <= len(self._loads), "a load that has ended keeps others waiting"
        self._saves.check()

    def _runs(self, block_hashes: HashArray, depth: int) -> list[_Run]:
        """Find what the tiers keep of a prefix from block `depth` on, nearest first."""
        off = {counts.tier for report in self._reports.values() for counts in report.tiers if counts.is_off}
        runs: list[_Run] = []
        while depth < len(block_hashes):
            for tier in self._counters:
                found = 0 if tier in off else self._mirror.locate(tier, block_hashes[depth:])
                if found:
                    runs.append(_Run(tier, depth, depth + found))
                    depth += found
                    break
            else:
                break
        return runs

    def _compute_s(self, new_tokens: int, cached_tokens: int) -> float | None:  # noqa: ARG002 - depth is not measured
        return self.prefill.seconds(new_tokens) if self.prefill.is_known else None

    def _note(self, rank: int, loaded: Loaded) -> None:
        """Note the end of a load in one process; in all of them it is over."""
        load = self._loads[loaded.load_id]
        load.by_rank[rank] = loaded
        if len(load.by_rank) < self._num_ranks:
            return
        del self._loads[loaded.load_id]
        self._loading.discard(load.hashes[0])
        if load.is_wanted:
            del self._load_of[load.request_id]
        if self._count(load) < len(load.hashes) and load.is_wanted:
            self._failed.add(load.request_id)

    def _count(self, load: _Load) -> int:
        """Count a load that is over; return how many leading blocks all processes have."""
        arrived, waited_s = 0, 0.0
        is_whole = True
        total = len(load.hashes)
        for number, run in enumerate(load.runs):
            results = [each.runs[number] for each in load.by_rank.values()]
            blocks, seconds = min(each[0] for each in results), max(each[1] for each in results)
            counters, wanted = self._counters[run.tier], run.end - run.start
            self._waiting[run.tier] -= wanted
            used = blocks if is_whole else 0
            arrived += used
            if blocks:
                self._speeds[run.tier].measure(blocks, seconds)
            counters.loads += 1
            counters.loaded_blocks += used
            counters.load_s += seconds
            counters.late_loads += any(each.is_late for each in load.by_rank.values()) and blocks < wanted
            if load.is_wanted:
                compute_s = self._compute_s(used * self._block_size, 0)
                if compute_s is not None:
                    counters.saved_s += compute_s - max(0.0, seconds - waited_s)
                waited_s = max(waited_s, seconds)
                if is_whole and used < wanted:
                    counters.missing_blocks += total - arrived
            is_whole &= used == wanted
        return arrived


_COUNTED = (
    "hit_tokens", "loads", "loaded_blocks", "load_s", "saved_s", "offloaded_blocks", "dropped_blocks", "late_loads",
    "missing_blocks",
)  # fmt: skip
