"""Loads of prefixes that no running request waits for: KV transfers bring them to reserved blocks, from tiers and a prefill worker."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from penstock.core.ids import BlockId
from penstock.core.types.events import Tier
from penstock.core.wire import HashArray
from penstock.kv.manager.clock import Clock, LoopClock
from penstock.kv.manager.counters import TierCounters
from penstock.kv.manager.prefix_load import PrefixLoad, find_runs
from penstock.kv.manager.worth import ComputeSeconds
from penstock.seams.kv import KvLoad, KvRun, KvSource, KvTier


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
