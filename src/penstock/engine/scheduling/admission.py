"""How requests that wait come into the batch: in turn, each as soon as there is room for it."""

import numpy as np

from penstock.core.ids import BlockId
from penstock.core.types.events import Tier
from penstock.engine.scheduling.config import SchedulerConfig
from penstock.engine.scheduling.partial_blocks import PartialBlocks
from penstock.engine.scheduling.queue import WaitingQueue
from penstock.engine.scheduling.sequences import Sequence, SequenceLimits
from penstock.engine.scheduling.slots import Slots
from penstock.kv.pool.pins import Pins
from penstock.kv.pool.pool import BlockPool
from penstock.kv.tiers.onboarding import Onboarding
from penstock.kv.tiers.tiers import TierBlocks, TieredPool


class Admission:
    """Gives waiting sequences slots, the blocks that are cached for them, and blocks for what they compute first.

    One scheduler owns it, and shares its queue, slots and pool with it.
    """

    def __init__(
        self,
        waiting: WaitingQueue[Sequence],
        slots: Slots,
        pool: BlockPool | TieredPool,
        *,
        limits: SequenceLimits,
        config: SchedulerConfig,
        onboarding: Onboarding | None,
    ) -> None:
        self.config = config
        self.pins = Pins(pool, self.look_again)
        """Blocks held for transfers."""
        self.partial_blocks = PartialBlocks(self.pins)
        """Those of them that no cache can give."""
        self.prefix_hit_tokens = 0
        """Tokens that were not computed as they were cached, so far."""
        self._waiting = waiting
        self._slots = slots
        self._pool = pool
        self._limits = limits
        self._onboarding = onboarding
        self._is_blocked = False  # the first one did not fit, and no block was given back since

    def look_again(self) -> None:
        """Note that blocks were given back, or that another one is first."""
        self._is_blocked = False

    def admit(self, budget: int, *, before: float | None = None) -> tuple[list[int], list[int]]:
        """Move waiting requests into the batch, in turn, while there is room for them; those of a rank below `before` alone.

        A request fits where all its known tokens and one more do, beside what running prefills will still need
        and one block of growth for each running request: else it would only be preempted soon.

        Returns:
            Their slots, and how many tokens each computes in this step.
        """
        slots: list[int] = []
        counts: list[int] = []
        if not self._waiting or self._is_blocked or budget <= 0 or not self._slots.has_free:
            return slots, counts
        self._waiting.rank_new(self._lacking)
        reserved = self.blocks_reserved()
        while self._waiting and budget > 0 and self._slots.has_free:
            sequence = self._waiting.first
            if before is not None and sequence.rank is not None and sequence.rank >= before:
                break
            size, known = self._limits.block_size, len(sequence.token_ids)
            hits = self._match(sequence)
            runs = self._worth_fetching(sequence, hits)
            held = hits + [block_id for run in runs if run.tier is Tier.DEVICE for block_id in run.block_ids]
            tail = self._lent_tokens(sequence, (known - 1) // size - len(hits))
            needed = known // size + 1 - len(held) - bool(tail)
            room = self._pool.num_available - self._pool.count_idle(held)
            if needed + reserved > room:
                if self.partial_blocks.give_all_back():
                    continue
                self._is_blocked = True
                break
            if runs:
                slot = self._take_in_to_onboard(sequence, hits, runs)
            else:
                count = min(budget, self.config.prompt_budget, known - len(hits) * size - tail)
                slot = self._take_in(sequence, hits, tail, count)
                budget -= count
                slots.append(slot)
                counts.append(count)
            reserved += 1 + known // size + 1 - int(self._slots.table.num_blocks[slot])
        return slots, counts

    def blocks_reserved(self) -> int:
        """Count the blocks that running requests will need soon: for the rest of their prefill and one more each."""
        running, table = self._slots.running_array(), self._slots.table
        lacking = table.num_tokens[running] // self._limits.block_size + 1 - table.num_blocks[running]
        return len(running) + int(np.maximum(lacking, 0).sum())

    def _match(self, sequence: Sequence) -> list[BlockId]:
        """Find the blocks that the device has of a waiting request; its last token is always computed: it is sampled from."""
        cacheable = (len(sequence.token_ids) - 1) // self._limits.block_size
        sequence.hash_blocks(sequence.token_ids, cacheable, self._limits)
        return self._pool.match(sequence.block_hashes[:cacheable])

    def _lacking(self, sequence: Sequence) -> int:
        """Count the tokens that a waiting request would have to compute now."""
        hits = self._match(sequence)
        fetched = sum(len(run.block_ids) for run in self._worth_fetching(sequence, hits))
        return len(sequence.token_ids) - (len(hits) + fetched) * self._limits.block_size

    def _lent_tokens(self, sequence: Sequence, lacking: int) -> int:
        """Count the tokens that it has past its full blocks; what is of no use, as of these some are lacking, is let go."""
        tail = self.partial_blocks.tokens_of(sequence.request.request_id)
        if lacking or tail > (len(sequence.token_ids) - 1) % self._limits.block_size:
            self.partial_blocks.give_back(sequence.request.request_id)
            return 0
        return tail

    def _take_in(self, sequence: Sequence, hits: list[BlockId], tail: int, num_new: int) -> int:
        """Give a waiting request a slot, the blocks that it has already, and blocks for its first tokens."""
        cached = len(hits) * self._limits.block_size
        slot = self._seat(sequence, hits, cached)
        if tail:
            self._slots.add_partial_block(slot, self.partial_blocks.take(sequence.request.request_id), tail)
        lacking = self._limits.blocks_for(cached + tail + num_new) - len(hits) - bool(tail)
        block_ids = self._pool.allocate(lacking)
        assert block_ids is not None, "admitted without room"
        self._slots.add_blocks(slot, block_ids)
        return slot

    def _seat(self, sequence: Sequence, hits: list[BlockId], cached: int) -> int:
        """Give a waiting request a slot and the blocks that the device has of it; `cached` tokens it need not compute."""
        self.prefix_hit_tokens += cached
        if sequence.cached_tokens is None:
            sequence.cached_tokens = min(cached, sequence.num_prompt)
        self._waiting.remove(sequence)
        self._pool.acquire(hits)
        return self._slots.seat(sequence, hits)

    def _worth_fetching(self, sequence: Sequence, hits: list[BlockId]) -> list[TierBlocks]:
        """Find what to bring into the device for a waiting request before it is computed."""
        if self._onboarding is None:
            return []
        known = len(sequence.token_ids)
        cacheable = (known - 1) // self._limits.block_size
        return self._onboarding.worth(sequence.block_hashes[:cacheable], hits, known)

    def _take_in_to_onboard(self, sequence: Sequence, hits: list[BlockId], runs: list[TierBlocks]) -> int:
        """Give a waiting request a slot, and begin to fetch what lower tiers have of it; until then it only holds blocks."""
        assert self._onboarding is not None, "found runs"
        size = self._limits.block_size
        if sequence.cached_tokens is None:
            self._onboarding.count(runs, sequence.num_prompt - len(hits) * size)
        cached = (len(hits) + sum(len(run.block_ids) for run in runs)) * size
        slot = self._seat(sequence, hits, cached)
        self._slots.add_blocks(slot, self._onboarding.begin(sequence.request.request_id, runs))
        return slot
