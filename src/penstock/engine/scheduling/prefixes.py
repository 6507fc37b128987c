"""Cached prefixes of waiting requests: found on the device and in lower tiers, held and loaded before their turn comes."""

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from penstock.core.ids import BlockId, RequestId
from penstock.engine.scheduling.config import SchedulerConfig
from penstock.engine.scheduling.order import WaitingQueue
from penstock.engine.scheduling.sequences import Sequence, SequenceLimits
from penstock.kv.loader import Arrival, ChosenPrefix
from penstock.kv.loads import leading_runs
from penstock.kv.manager import KvManager
from penstock.kv.pool import BlockPool, Pins
from penstock.kv.windows import WindowPrefixes
from penstock.seams.kv import KvRun


class CachedPrefix(NamedTuple):
    """The cached part of a waiting request's prefix.

    hits:    leading blocks on the device
    runs:    blocks after them in lower tiers that are worth loading
    targets: where these are being loaded already; None if they are not
    end:     of a model with several groups of layers, length of the prefix in blocks; None for others
    num_found: then also the leading blocks of the first group that are held, at least `end`
    windows: then by group the blocks of the prefix's last window on the device; empty if they are loaded
    """

    hits: list[BlockId]
    runs: SequenceOf[KvRun]
    targets: list[BlockId] | None
    end: int | None = None
    num_found: int = 0
    windows: SequenceOf[SequenceOf[BlockId]] = ()

    @property
    def num_lower(self) -> int:
        """Blocks of tokens that are loaded from lower tiers."""
        if self.end is not None:
            return self.end - len(self.hits)
        return sum(run.num_blocks for run in self.runs) if self.targets is None else len(self.targets)


@dataclass(slots=True, eq=False)
class _Held:
    """The blocks of a waiting request's prefix, each with a reference.

    hits:       on the device, loaded ones included
    targets:    of the load, which have not arrived
    num_before: hits that were not loaded
    runs:       what is or was loaded
    num_taken:  blocks that nothing else held when they were taken
    is_loading: a load has not ended
    is_short:   a load ended without all its blocks; there is no second one
    """

    sequence: Sequence
    hits: list[BlockId]
    targets: list[BlockId]
    num_before: int
    runs: SequenceOf[KvRun]
    num_taken: int
    is_loading: bool = False
    is_short: bool = False

    @property
    def num_blocks(self) -> int:
        """Blocks in all."""
        return len(self.hits) + len(self.targets)


class Prefixes:
    """The cached prefixes of one scheduler's waiting requests.

    The next `prefetched_requests` of the queue hold their cached blocks and load what lower tiers have, each only if it and all
    before it fit. So prefetches keep no request from the batch. They end when running requests or an earlier one need the blocks.
    """

    def __init__(
        self,
        waiting: WaitingQueue[Sequence],
        pool: BlockPool,
        kv: KvManager | None,
        limits: SequenceLimits,
        config: SchedulerConfig,
    ) -> None:
        """Make it without any.

        Args:
            waiting: the requests.
            pool: the device's blocks.
            kv: the tiers below the device; None without: then nothing is held.
            limits: bounds of every request.
            config: bounds of the batch.
        """
        self.num_taken = 0
        """Blocks that prefetches alone hold."""
        self.config = config
        self._waiting = waiting
        self._pool = pool
        self._kv = kv
        self._limits = limits
        self.windows = None if limits.groups is None else WindowPrefixes(pool, limits.groups)
        """Finds windows of groups of layers; None for models with one table of blocks."""
        self._ahead_max = 0 if kv is None or self.windows is not None else config.prefetched_requests
        self._held: dict[RequestId, _Held] = {}
        self._may_look = False

    def look_again(self) -> None:
        """Look for prefixes to hold in the next step: a request has come or left, or blocks were freed."""
        self._may_look = True

    def find(self, sequence: Sequence, ahead: SequenceOf[tuple[int, int]] = ()) -> CachedPrefix:
        """Find what is cached of a waiting request and may be taken: see `Sequence.cacheable`.

        Args:
            sequence: the request.
            ahead: what is computed before its turn, as (tokens, tokens before them).
        """
        held = self._held.get(sequence.request.request_id)
        if held is not None and held.is_loading:
            return CachedPrefix(held.hits, held.runs, held.targets)
        known = len(sequence.token_ids)
        cacheable = sequence.cacheable // self._limits.block_size
        sequence.hash_blocks(sequence.token_ids, cacheable, self._limits)
        hashes = sequence.block_hashes[:cacheable]
        hits = self._pool.match(hashes)
        if self.windows is not None:
            return self._find_grouped(self.windows, sequence, hits, ahead)
        if self._kv is None or (held is not None and held.is_short):
            return CachedPrefix(hits, (), None)
        return CachedPrefix(hits, self._kv.choose_runs(hashes, hits, known, ahead), None)

    def lacking(self, sequence: Sequence) -> int:
        """Count the tokens that a waiting request would have to compute if admitted now."""
        cached = self.find(sequence)
        num_cached = len(cached.hits) + cached.num_lower
        return len(sequence.token_ids) - num_cached * self._limits.block_size

    def window_blocks(self, sequence: Sequence, num_cached: int) -> int:
        """Count the blocks of a waiting request's windows, of which it need not compute `num_cached` blocks of tokens.

        It takes them at admission, for its prompt's chunks and for its whole answer.
        """
        limits, known = self._limits, len(sequence.token_ids)
        step_tokens = min(known - num_cached * limits.block_size, self.config.prompt_budget)
        return max(
            limits.windows.blocks(known, step_tokens, limits.block_size),
            limits.windows.blocks(sequence.end_tokens, 1, limits.block_size),
        )

    def hold(self, count_free: Callable[[], int], running: Callable[[], list[tuple[int, int]]]) -> None:
        """Hold the prefixes of the next requests, and begin to load what lower tiers have, as far as all of them fit.

        Args:
            count_free: counts the blocks that running requests do not need.
            running: gives what running requests still have to compute of their prompts, as (tokens, tokens before them).
        """
        if not (self._ahead_max and self._may_look and self._waiting):
            return
        self._may_look = False
        size, free = self._limits.block_size, count_free()
        self._waiting.rank_new(self.lacking)
        ahead: list[tuple[int, int]] | None = None
        passed: list[tuple[int, int]] = []
        upcoming = list(islice(self._waiting, self._ahead_max))
        for sequence in upcoming:
            known = len(sequence.token_ids)
            held = self._held.get(sequence.request.request_id)
            num_held = 0 if held is None else held.num_blocks
            free -= known // size + 1 - num_held + self.window_blocks(sequence, num_held)
            if free < 0:
                break
            if held is None:
                if len(self._held) == self._ahead_max:
                    self._end_overtaken(upcoming)
                ahead = running() if ahead is None else ahead
                held = self._begin(sequence, [*ahead, *passed])
            cached = held.num_blocks * size
            passed.append((known - cached, cached))

    def arrived(self, arrival: Arrival) -> None:
        """Publish what was loaded of a waiting request's prefix, and release what will not come."""
        held = self._held[arrival.request_id]
        come = list(arrival.block_ids)
        own, left = held.targets[: len(come)], held.targets[len(come) :]
        num_shared = sum(one != other for one, other in zip(come, own, strict=True))
        held.num_taken -= num_shared
        self.num_taken -= num_shared
        hashes, start = held.sequence.block_hashes, len(held.hits)
        parent = int(hashes[start - 1, 0]) if start else None
        self._pool.commit(come, hashes[start : start + len(come)], parent)
        held.hits, held.targets = held.hits + come, left
        if arrival.is_over:
            self._pool.release(left)
            held.targets, held.is_loading, held.is_short = [], False, bool(left)
            held.runs = leading_runs(held.runs, len(held.hits) - held.num_before)
            held.num_taken -= len(left)
            self.num_taken -= len(left)
        self._may_look = True

    def pass_on(self, sequence: Sequence) -> None:
        """Release the blocks of a request that is admitted, and holds its hits by now; it takes over the targets of its load."""
        held = self._pop(sequence)
        self._may_look = True  # another one is among the next
        if held is None:
            return
        self._pool.release(held.hits)
        if self._kv is not None and sequence.cached_tokens is None:
            self._kv.count(held.runs, sequence.num_prompt - held.num_before * self._limits.block_size)

    def end(self, sequence: Sequence) -> None:
        """Release the blocks of a waiting request and cancel its load. A request without blocks is left alone."""
        held = self._pop(sequence)
        if held is None:
            return
        if self._kv is not None and held.runs:
            self._kv.count_wasted(held.runs)
            self._kv.cancel(sequence.request.request_id)
        self._pool.release(held.hits + held.targets)

    def give_way(self, first: Sequence | None = None) -> bool:
        """End the newest prefetch, since others need its blocks; return whether there was one.

        Args:
            first: keep this request's.
        """
        for held in reversed(self._held.values()):
            if held.sequence is not first:
                self.end(held.sequence)
                return True
        return False

    def _end_overtaken(self, upcoming: SequenceOf[Sequence]) -> None:
        """End the newest prefetch of a request that is no longer among the next: others that came later are before it."""
        names = {sequence.request.request_id for sequence in upcoming}
        overtaken = next(name for name in reversed(self._held) if name not in names)
        self.end(self._held[overtaken].sequence)

    def holders(self) -> Counter[BlockId]:
        """Count its references to each block."""
        holders: Counter[BlockId] = Counter()
        for held in self._held.values():
            holders.update(held.hits)
            holders.update(held.targets)
        return holders

    def check(self) -> None:
        """Raise AssertionError if the state is inconsistent."""
        assert len(self._held) <= self._ahead_max, "more requests hold prefixes than are looked at"
        for held in self._held.values():
            assert held.sequence in self._waiting, "a prefix is held for a request that does not wait"
        assert self.num_taken == sum(held.num_taken for held in self._held.values()), "miscounted"

    def _find_grouped(
        self,
        windows: WindowPrefixes,
        sequence: Sequence,
        hits: list[BlockId],
        ahead: SequenceOf[tuple[int, int]],
    ) -> CachedPrefix:
        """Find the longest prefix that is held in all groups of layers."""
        known = len(sequence.token_ids)
        hashes = sequence.block_hashes[: sequence.cacheable // self._limits.block_size]
        if self._kv is None or sequence.is_short:
            chosen = ChosenPrefix(windows.longest(hashes, len(hits)), (), len(hits))
        else:
            chosen = self._kv.choose_prefix(hashes, len(hits), known, ahead)
        held = () if chosen.runs else windows.windows(hashes, chosen.end)
        return CachedPrefix(hits[: chosen.end], chosen.runs, None, chosen.end, chosen.num_found, held)

    def _begin(self, sequence: Sequence, ahead: SequenceOf[tuple[int, int]]) -> _Held:
        cached = self.find(sequence, ahead)
        hits, runs = cached.hits, cached.runs
        targets: list[BlockId] = []
        num_taken = self._pool.count_idle(hits)
        self._pool.acquire(hits)
        if runs:
            assert self._kv is not None, "found runs"
            targets = self._kv.begin(sequence.request.request_id, runs, ahead)
            self._kv.count_prefetch(runs)
        num_taken += len(targets)
        held = _Held(sequence, hits, targets, len(hits), runs, num_taken, is_loading=bool(runs))
        self.num_taken += held.num_taken
        self._held[sequence.request.request_id] = held
        return held

    def _pop(self, sequence: Sequence) -> _Held | None:
        held = self._held.pop(sequence.request.request_id, None)
        if held is not None:
            self.num_taken -= held.num_taken
        return held


class PartialBlocks:
    """The kept and given blocks of one scheduler, held as pins. Not thread-safe."""

    def __init__(self, pins: Pins) -> None:
        self.keeps_any = True
        """Whether blocks of ended requests are kept; False in an engine without KV transfers."""
        self._pins = pins
        self._kept: dict[RequestId, BlockId] = {}
        self._given: dict[RequestId, tuple[BlockId, int]] = {}

    def keep(self, request_id: RequestId, block_id: BlockId) -> None:
        """Pin the last block of a request that ends, until it is claimed or the next step begins."""
        if self.keeps_any:
            self._pins.hold([block_id])
            self._kept[request_id] = block_id

    def claim(self, request_id: RequestId) -> BlockId | None:
        """Pass a kept block and its pin to the caller; None where no block is kept."""
        return self._kept.pop(request_id, None)

    def free_kept(self) -> None:
        """Unpin the kept blocks that were not claimed."""
        if self._kept:
            self._pins.unpin(list(self._kept.values()))
            self._kept.clear()

    def give(self, request_id: RequestId, block_id: BlockId, num_tokens: int) -> None:
        """Give a block, which the caller has pinned, to a waiting request; its first `num_tokens` tokens are computed."""
        self.free_given(request_id)
        if num_tokens > 0:
            self._given[request_id] = block_id, num_tokens
        else:
            self._pins.unpin([block_id])

    def given_tokens(self, request_id: RequestId) -> int:
        """Count the computed tokens in the block given to a request; 0 if there is none."""
        given = self._given.get(request_id)
        return 0 if given is None else given[1]

    def take_given(self, request_id: RequestId) -> BlockId:
        """Turn the pin of a given block into a reference of the request's sequence."""
        block_id, _ = self._given.pop(request_id)
        self._pins.pass_on([block_id])
        return block_id

    def free_given(self, request_id: RequestId) -> None:
        """Unpin the block given to a request; no error if there is none."""
        given = self._given.pop(request_id, None)
        if given is not None:
            self._pins.unpin([given[0]])

    def free_all_given(self) -> bool:
        """Unpin all given blocks, since other requests need them; return whether there were any."""
        given = tuple(self._given)
        for request_id in given:
            self.free_given(request_id)
        return bool(given)

    def check(self, waiting: set[RequestId]) -> None:
        """Raise AssertionError if a given block belongs to no waiting request, or a block is not pinned."""
        assert self._given.keys() <= waiting, "a block was given to a request that does not wait"
        held = self._pins.holders()
        for block_id in (*self._kept.values(), *(block_id for block_id, _ in self._given.values())):
            assert held.get(block_id, 0) > 0, f"block {block_id} of a tail is not held"
