"""Admission of waiting requests in the jump engine; the counterpart of `penstock.engine.scheduling.admission`."""

from penstock.core.ids import BlockId
from penstock.core.types.events import Tier
from penstock.engine.scheduling.config import SchedulerConfig
from penstock.engine.scheduling.queue import WaitingQueue
from penstock.kv.pool.pool import BlockPool
from penstock.kv.tiers.onboarding import Onboarding
from penstock.kv.tiers.tiers import TierBlocks, TieredPool
from penstock.sim.engine.batch import Batch, SimSequence, give_blocks


class JumpAdmission:
    """Gives waiting sequences their cached blocks, and blocks for their first prefill chunk.

    One scheduler owns it and shares its queue, batch and pool.
    """

    def __init__(
        self,
        waiting: WaitingQueue[SimSequence],
        batch: Batch,
        pool: BlockPool | TieredPool,
        *,
        config: SchedulerConfig,
        onboarding: Onboarding | None,
    ) -> None:
        self.prefix_hit_tokens = 0
        """Cached prompt tokens of admitted sequences."""
        self._waiting = waiting
        self._batch = batch
        self._pool = pool
        self._size = pool.block_size
        self._config = config
        self._onboarding = onboarding
        self._is_blocked = False  # the first sequence did not fit, and no block was freed since

    def look_again(self) -> None:
        """Retry admission: blocks were freed or fetched, or another sequence is first."""
        self._is_blocked = False

    def may_admit(self) -> bool:
        """Tell whether a waiting sequence might fit."""
        return bool(
            self._waiting
            and not self._is_blocked
            and len(self._batch.running) < self._config.max_running_requests
        )

    def admit(self, budget: int, *, before: float | None = None) -> list[tuple[SimSequence, int]]:
        """Admit waiting sequences in order while blocks and budget last; the counterpart of `Admission.admit`.

        With `before`, only sequences of a lower rank are admitted, before running sequences got their blocks of this step.
        """
        admitted: list[tuple[SimSequence, int]] = []
        if budget <= 0 or not self.may_admit():
            return admitted
        self._waiting.rank_new(self._lacking)
        pool, size, batch = self._pool, self._size, self._batch
        reserved = self.blocks_reserved(1 if before is None else 2)
        while self._waiting and budget > 0 and len(batch.running) < self._config.max_running_requests:
            sequence = self._waiting.first
            if before is not None and sequence.rank is not None and sequence.rank >= before:
                break
            known = sequence.known
            names = sequence.name_blocks((known - 1) // size, size)
            hits = pool.match(names)
            held, runs = hits, list[TierBlocks]()
            if self._onboarding is not None:
                runs = self._onboarding.worth(names, hits, known)
                held = hits + [b for run in runs if run.tier is Tier.DEVICE for b in run.block_ids]
            room = pool.num_available - pool.count_idle(held)
            if known // size + 1 - len(held) + reserved > room:
                self._is_blocked = True
                break
            self._take_in(sequence, hits, runs)
            if runs:
                self._begin_fetch(sequence, runs)
            else:
                new = min(budget, self._config.prompt_budget, known - sequence.computed)
                give_blocks(pool, [(sequence, -(-(sequence.computed + new) // size) - len(hits))])
                batch.admit(sequence)
                budget -= new
                admitted.append((sequence, new))
            reserved += 1 + known // size + 1 - len(sequence.blocks)
        return admitted

    def blocks_reserved(self, steps: int = 1) -> int:
        """Count the blocks that running requests need soon: for the rest of their prefill and one more each.

        Args:
            steps: 2 if decoding sequences lack their blocks of the next step.
        """
        batch, size = self._batch, self._size
        reserved = len(batch.running) + batch.blocks_due(batch.tick + 2 - steps, steps)
        return reserved + sum(
            max(s.known // size + 1 - len(s.blocks), 0) for s in (*batch.prefilling, *batch.onboarding)
        )

    def _lacking(self, sequence: SimSequence) -> int:
        """Count the uncached tokens of a waiting sequence."""
        names = sequence.name_blocks((sequence.known - 1) // self._size, self._size)
        hits = self._pool.match(names)
        fetched = 0
        if self._onboarding is not None:
            fetched = sum(len(run.block_ids) for run in self._onboarding.worth(names, hits, sequence.known))
        return sequence.known - (len(hits) + fetched) * self._size

    def _take_in(self, sequence: SimSequence, hits: list[BlockId], runs: list[TierBlocks]) -> None:
        """Give a waiting sequence its cached blocks on the device, and count its cached tokens."""
        self._waiting.remove(sequence)
        self._pool.acquire(hits)
        sequence.blocks = hits
        sequence.published = len(hits)
        sequence.parent = int(sequence.hashes[len(hits) - 1, 0]) if hits else None
        sequence.computed = len(hits) * self._size
        cached = sequence.computed + sum(len(run.block_ids) for run in runs) * self._size
        self.prefix_hit_tokens += cached
        if sequence.cached_tokens is None:
            sequence.cached_tokens = min(cached, sequence.num_prompt)
            if self._onboarding is not None:
                self._onboarding.count(runs, sequence.num_prompt - sequence.computed)

    def _begin_fetch(self, sequence: SimSequence, runs: list[TierBlocks]) -> None:
        """Start fetching a sequence's blocks from lower tiers; meanwhile it only holds target blocks."""
        assert self._onboarding is not None, "found runs"
        sequence.blocks = sequence.blocks + self._onboarding.begin(sequence.request.request_id, runs)
        self._batch.admit_to_onboard(sequence)
