"""A tier copier that copies nothing and takes the time of a latency model."""

import asyncio
from collections.abc import Callable, Sequence

from penstock.core.types.events import Tier
from penstock.kv.tiers.onboarding import TierCopier
from penstock.kv.tiers.tiers import Fetch, TierBlocks
from penstock.perf.latency import LatencyModel
from penstock.sim.engine.timing import Pace


class TimedTierCopier(TierCopier):
    """Fetches from one tier run one after another at the tier's full bandwidth, concurrently with engine steps.

    Write-back takes no time: it uses the other direction of the link, which is rarely full (docs/decisions/0016).
    """

    def __init__(self, latency: LatencyModel, block_size: int, pace: Pace) -> None:
        """Create it idle.

        Args:
            latency: gives the time of a fetch and of recomputing.
            block_size: tokens in a block.
            pace: speed of the host.
        """
        self._latency = latency
        self._block_size = block_size
        self._block_bytes = latency.kv_bytes_per_token * block_size
        self._pace = pace
        pace.watch(self._on_pace)
        self._loop = asyncio.get_running_loop()
        self._free_at_s = dict.fromkeys(Tier, 0.0)
        self._timers: dict[Fetch, asyncio.TimerHandle] = {}
        self._late: dict[Fetch, Callable[[], None]] = {}  # fetches that ended while the host is stopped

    def write_back(self, source: TierBlocks, target: TierBlocks) -> None:
        """Do nothing."""

    def worth(self, runs: Sequence[TierBlocks], cached_tokens: int, known_tokens: int) -> int:
        best, best_s = 0, self._compute_s(known_tokens, cached_tokens)
        fetched_s = 0.0
        for count, (tier, block_ids) in enumerate(runs, 1):
            fetched_s = max(fetched_s, self._wait_s(tier)) + self._price_s(tier, len(block_ids))
            cached_tokens += len(block_ids) * self._block_size
            total_s = fetched_s + self._compute_s(known_tokens, cached_tokens)
            if total_s < best_s:
                best, best_s = count, total_s
        return best

    def fetch(self, fetch: Fetch, done: Callable[[], None]) -> None:
        end_s = self._loop.time()
        for tier, block_ids in fetch.sources:
            end_s = max(end_s, self._free_at_s[tier]) + self._price_s(tier, len(block_ids))
            self._free_at_s[tier] = end_s
        self._timers[fetch] = self._loop.call_at(end_s, self._on_time, fetch, done)

    def cancel(self, fetch: Fetch) -> None:
        """Drop a fetch; its tier stays busy until its end time."""
        self._late.pop(fetch, None)
        timer = self._timers.pop(fetch, None)
        if timer is not None:
            timer.cancel()

    def close(self) -> None:
        """Drop all fetches."""
        for fetch in tuple(self._timers):
            self.cancel(fetch)
        self._late.clear()

    def _on_time(self, fetch: Fetch, done: Callable[[], None]) -> None:
        del self._timers[fetch]
        if self._pace.is_going:
            done()
        else:
            self._late[fetch] = done

    def _on_pace(self) -> None:
        if self._pace.is_going:
            late, self._late = self._late, {}
            for done in late.values():
                done()

    def _wait_s(self, tier: Tier) -> float:
        return max(self._free_at_s[tier] - self._loop.time(), 0.0)

    def _compute_s(self, known_tokens: int, cached_tokens: int) -> float:
        return self._pace.factor * self._latency.prefill_s(known_tokens - cached_tokens, cached_tokens)

    def _price_s(self, tier: Tier, blocks: int) -> float:
        if tier is Tier.DEVICE:
            return 0.0
        return self._pace.factor * self._latency.onboard_s(blocks * self._block_bytes, tier)
