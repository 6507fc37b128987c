"""The scheduler's side: what the tiers have of a prompt, which blocks are loaded, and which are offloaded.

The device processes are the truth. This side knows what they reported with the steps so far. A block that was evicted since
then is missing from its load, and computed.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import msgspec

from penstock.core.types.events import AllBlocksCleared, KvEvent, Tier
from penstock.core.types.instances import KvHolder
from penstock.core.types.load import KvTierCounts
from penstock.core.wire import HashArray
from penstock.kv.connector.mirror import TierMirror
from penstock.kv.connector.orders import Loaded, LoadOrder, LoadRun, Orders, Report
from penstock.kv.connector.plans import LoadPlan, Planner
from penstock.kv.connector.saves import DeviceCache, Saves
from penstock.kv.groups import GroupEvents, GroupKind, KvGroup, KvGroups
from penstock.kv.load_or_compute import LOAD_HALF_LIFE_S, MeasuredPrefill, MeasuredSpeed, worth_loading
from penstock.kv.loads import TierCounters

_QUICK_S = 0.01
"""A step may wait so long for loads from the host: a load beside the steps is heard of one or two steps later."""
_LINGER_S = 1.0
"""Steps are asked for so long after the last order, so that events are told although no request comes."""
_ASK_S = 0.25
"""A step is asked for so long after the last one, if other workers store blocks that this one loads."""
_STALE_S = 1.0
"""A request that comes so long after the last report waits for the next one,"""
_HEAR_S = 0.1
"""but not longer than this."""


@dataclass(slots=True, eq=False)
class _Load:
    """A load under way in all device processes."""

    request_id: str
    plan: LoadPlan
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
        groups: KvGroups | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """Begin before the device processes have reported.

        Args:
            device: holds device blocks while they are copied.
            block_size: tokens in a block.
            num_blocks: of the device.
            num_ranks: device processes, each of which keeps its part of every block.
            groups: of the model's layers; None for one table of blocks.
            clock: seconds.
        """
        self.prefill = MeasuredPrefill()
        """The engine measures its steps."""
        self.holders: tuple[KvHolder, ...] = ()
        """Whose blocks the tiers load that other workers load from too; empty before all processes have reported."""
        self._block_size = block_size
        self._num_ranks = num_ranks
        self._clock = clock
        self._groups = groups or KvGroups([KvGroup(GroupKind.FULL, (), 0)], block_size)
        self._mirror = TierMirror(num_ranks)
        self._planner = Planner(self._groups, self._mirror, block_size)
        self._reports: dict[int, Report] = {}
        """The latest of each process."""
        self._counters: dict[Tier, TierCounters] = {}
        self._speeds: dict[Tier, MeasuredSpeed] = {}
        self._block_load_s: dict[Tier, float] = {}
        """Of the slowest process, as its tier measures."""
        self._waiting: Counter[Tier] = Counter()
        """Blocks of loads under way."""
        self._plans: dict[str, LoadPlan] = {}
        self._junctions: dict[str, int] = {}
        """As `junction` returns them."""
        self._loads: dict[int, _Load] = {}
        self._load_of: dict[str, int] = {}
        self._loading: set[int] = set()
        """First block of each load under way."""
        self._failed: set[str] = set()
        """Requests that compute what a load did not bring, and load nothing more."""
        self._saves = Saves(device, self._mirror, self._groups, pinned_max=max(1, num_blocks // 8))
        self._orders: list[LoadOrder] = []
        self._cancelled: list[int] = []
        self._is_clearing = False
        self._next_id = 0
        self._told = GroupEvents(self._groups, block_size)
        self._events: list[KvEvent] = []
        self._ordered_s = self._stepped_s = self._heard_s = clock()
        self._asked_s: float | None = None
        """When a request began to wait for a report."""

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
            as many as are predicted to be loaded sooner than computed; None to be asked again at the next step: while they
            are loaded for another request, or what other workers have stored was not heard of for a while.
        """
        self._plans.pop(request_id, None)
        if request_id in self._failed or num_cached >= len(block_hashes):
            return 0
        if int(block_hashes[num_cached, 0]) in self._loading or self._has_to_hear():
            return None
        plan = self._planner.plan(block_hashes, num_cached, self._tiers_on())
        if plan.num_found > plan.num_blocks:
            self._junctions[request_id] = num_cached + plan.num_found
        if not plan.num_blocks:
            return 0
        tokens = [run.num_tokens for run in plan.runs]
        if not self._groups.is_one_table:  # of no use before the last one has arrived
            tokens = [0] * (len(tokens) - 1) + [sum(tokens)]
        count = worth_loading(
            [(run.tier, run.num_blocks, each) for run, each in zip(plan.runs, tokens, strict=True)],
            lambda tier, blocks: self._load_s(tier, self._waiting[tier] + blocks),
            self._compute_s,
            known_tokens=known_tokens,
            cached_tokens=num_cached * self._block_size,
        )
        if not count:
            return 0
        if count < len(plan.runs):
            plan = plan.cut(plan.runs[count - 1].end)
        self._plans[request_id] = plan
        return plan.num_blocks

    def junction(self, request_id: str) -> int:
        """Return how many blocks a prompt shares with another one, if some group with a window lacks its blocks there; else 0.

        The engine should keep these blocks for `commit`: others may have the same beginning.
        """
        return self._junctions.get(request_id, 0)

    def is_quick(self, request_id: str) -> bool:
        """Say whether the load that `match` found is predicted so short that the next step may wait for it."""
        runs = self._plans[request_id].runs
        if any(run.tier is not Tier.HOST for run in runs) or not self._speeds[Tier.HOST].is_known:
            return False
        blocks = self._waiting[Tier.HOST] + sum(run.num_blocks for run in runs)
        return self._speeds[Tier.HOST].seconds(blocks) <= _QUICK_S

    def reserve(
        self,
        request_id: str,
        block_ids: Sequence[Sequence[int]],
        num_blocks: int,
        *,
        is_awaited: bool = False,
    ) -> None:
        """Order the load that `match` found.

        Args:
            request_id: of the request.
            block_ids: by group, its device blocks, from the first one on. Those that are loaded stay the load's until it has
                ended in all processes.
            num_blocks: as many as `match` returned; or fewer, in a model with one table of blocks.
            is_awaited: the next step waits for it.
        """
        plan = self._plans.pop(request_id)
        if num_blocks < plan.num_blocks:
            assert self._groups.is_one_table, (
                f"{num_blocks} of {plan.num_blocks} blocks: windows end elsewhere"
            )
            plan = plan.cut(num_blocks)
        targets = self._planner.targets(plan, block_ids)
        self._next_id += 1
        orders = []
        for run in plan.runs:
            self._waiting[run.tier] += run.num_blocks
            self._counters[run.tier].hit_tokens += run.num_tokens
            hashes = plan.block_hashes[run.start : run.end]
            orders.append(LoadRun(run.tier, hashes, targets[run.start : run.end]))
        self._loads[self._next_id] = _Load(request_id, plan)
        self._load_of[request_id] = self._next_id
        self._loading.add(plan.first)
        self._orders.append(LoadOrder(self._next_id, request_id, tuple(orders), is_awaited))

    def is_loading(self, request_id: str) -> bool:
        """Say whether a request's load is under way."""
        return request_id in self._load_of

    def commit(
        self, block_hashes: HashArray, keys: Sequence[Sequence[Any]], ends: Collection[int] = ()
    ) -> None:
        """Have complete blocks offloaded. Of a group with a window only those that prefixes of certain lengths need.

        Args:
            block_hashes: (n, 2) uint64, of a prefix from its first block on.
            keys: by group, (n,) what `DeviceCache.pin` finds its blocks by.
            ends: lengths, in blocks, after which another request may go on, as far as the device has the blocks.
        """
        self._saves.add(block_hashes, keys, ends)

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended; its load, if one is under way, is cancelled."""
        self._plans.pop(request_id, None)
        self._junctions.pop(request_id, None)
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
        self._stepped_s = self._clock()
        orders = Orders(tuple(self._orders), tuple(self._cancelled), saves, self._is_clearing)
        if orders.loads or saves or self._is_clearing:
            self._ordered_s = self._clock()
        self._orders, self._cancelled, self._is_clearing = [], [], False
        return orders

    def take_reports(self, reports: Mapping[int, Report]) -> None:
        """Note what device processes have done, by their number."""
        self._heard_s, self._asked_s = self._clock(), None
        for rank, report in reports.items():
            self._reports[rank] = report
            self._mirror.shared = {
                counts.tier: holder.kind
                for counts, holder in zip(report.tiers, report.shared, strict=True)
                if holder is not None
            }
            told = self._told.translate(self._mirror.apply(rank, report.events))
            self._events += [self._held_by(event) for event in told]
            for counts in report.tiers:
                self._counters.setdefault(counts.tier, TierCounters())
                speed = MeasuredSpeed(half_life_s=LOAD_HALF_LIFE_S, clock=self._clock)
                self._speeds.setdefault(counts.tier, speed)
            for loaded in report.loaded:
                self._note(rank, loaded)
            for save_id in report.saved:
                self._saves.note(save_id, self._num_ranks)
        latest = self._reports.values()
        for number, tier in enumerate(self._counters):
            self._block_load_s[tier] = max(each.block_load_s[number] for each in latest)
        if len(latest) == self._num_ranks:
            by_tier = zip(*(each.shared for each in latest), strict=True)
            self.holders = tuple(_whole(parts) for parts in by_tier if all(parts))
        self._saves.tiers = tuple(self._counters)
        dropped = self._saves.take_dropped()
        for counters in self._counters.values():
            counters.dropped_blocks += dropped

    def clear(self) -> None:
        """Have all tiers forget their blocks."""
        self._saves.clear()
        self._plans.clear()
        self._is_clearing = True

    @property
    def needs_steps(self) -> bool:
        """Whether steps are needed though no request is there: to begin what was ordered, and to hear what was done."""
        if len(self._reports) < self._num_ranks or self._loads or self._orders or self._is_clearing:
            return True
        if self._saves.is_pending:
            return True
        if self.holders and self._clock() - self._stepped_s >= _ASK_S:
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

    def _has_to_hear(self) -> bool:
        """Say whether a request waits for a report: the first after a pause, in a worker whose tiers others fill too."""
        now_s = self._clock()
        if not self.holders or now_s - self._heard_s < _STALE_S:
            return False
        if self._asked_s is None:
            self._asked_s = now_s
        return now_s - self._asked_s < _HEAR_S

    def _held_by(self, event: KvEvent) -> KvEvent:
        """Note in an event who holds its blocks."""
        if isinstance(event, AllBlocksCleared) or event.tier not in self._mirror.shared:
            return event
        return msgspec.structs.replace(event, holder=self._mirror.shared[event.tier])

    def _load_s(self, tier: Tier, num_blocks: int) -> float:
        """Predict the seconds until a tier has loaded so many blocks: what was seen here fades, what the tier measures does not."""
        return max(self._speeds[tier].seconds(num_blocks), self._block_load_s[tier] * num_blocks)

    def _tiers_on(self) -> list[Tier]:
        off = {counts.tier for report in self._reports.values() for counts in report.tiers if counts.is_off}
        return [tier for tier in self._counters if tier not in off]

    def _compute_s(self, new_tokens: int, cached_tokens: int) -> float | None:  # noqa: ARG002 - depth is not measured
        return self.prefill.seconds(new_tokens) if self.prefill.is_known else None

    def _note(self, rank: int, loaded: Loaded) -> None:
        """Note the end of a load in one process; in all of them it is over."""
        load = self._loads[loaded.load_id]
        load.by_rank[rank] = loaded
        if len(load.by_rank) < self._num_ranks:
            return
        del self._loads[loaded.load_id]
        self._loading.discard(load.plan.first)
        if load.is_wanted:
            del self._load_of[load.request_id]
        if not self._count(load) and load.is_wanted:
            self._failed.add(load.request_id)

    def _count(self, load: _Load) -> bool:
        """Count a load that is over; return whether all of it has arrived in all processes."""
        runs, ranks = load.plan.runs, tuple(load.by_rank.values())
        arrived = [min(rank.runs[number][0] for rank in ranks) for number in range(len(runs))]
        is_whole = all(blocks == run.num_blocks for blocks, run in zip(arrived, runs, strict=True))
        is_of_use = is_whole or self._groups.is_one_table
        waited_s, left, is_leading = 0.0, len(load.plan.block_hashes), True
        for number, (run, blocks) in enumerate(zip(runs, arrived, strict=True)):
            seconds = max(rank.runs[number][1] for rank in ranks)
            counters, wanted = self._counters[run.tier], run.num_blocks
            self._waiting[run.tier] -= wanted
            used = blocks if is_leading else 0
            left -= used
            if blocks:
                self._speeds[run.tier].measure(blocks, seconds)
            counters.loads += 1
            counters.loaded_blocks += used
            counters.load_s += seconds
            counters.late_loads += any(rank.is_late for rank in ranks) and blocks < wanted
            if load.is_wanted:
                tokens = run.num_tokens * used // wanted if is_of_use else 0
                compute_s = self._compute_s(tokens, 0)
                if compute_s is not None:
                    counters.saved_s += compute_s - max(0.0, seconds - waited_s)
                waited_s = max(waited_s, seconds)
                if is_leading and used < wanted:
                    counters.missing_blocks += left
            is_leading &= used == wanted
        return is_whole


def _whole(parts: Sequence[KvHolder | None]) -> KvHolder:
    """Describe a holder of whole blocks by those of each process's part."""
    known = [part for part in parts if part is not None]
    if len(known) == 1:
        return known[0]
    names = " ".join(sorted(part.id for part in known)).encode()
    digest = hashlib.blake2b(names, digest_size=16).hexdigest()
    return KvHolder(kind=known[0].kind, id=digest, blocks=min(part.blocks for part in known))


_COUNTED = (
    "hit_tokens", "loads", "loaded_blocks", "load_s", "saved_s", "offloaded_blocks", "dropped_blocks", "late_loads",
    "missing_blocks",
)  # fmt: skip
