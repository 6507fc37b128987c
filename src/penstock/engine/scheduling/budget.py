"""The token budget of a step: who computes how many tokens in it."""

import numpy as np

from penstock.engine.scheduling.admission import Admission
from penstock.engine.scheduling.config import SchedulerConfig
from penstock.engine.scheduling.queue import WaitingQueue
from penstock.engine.scheduling.sequences import Sequence
from penstock.engine.scheduling.slots import Int32s, Slots


class Budget:
    """Shares the budget of each step of one scheduler among its requests."""

    def __init__(
        self, waiting: WaitingQueue[Sequence], slots: Slots, admission: Admission, config: SchedulerConfig
    ) -> None:
        self.config = config
        self._waiting = waiting
        self._slots = slots
        self._admission = admission

    def share(self, slots: Int32s, remaining: Int32s) -> tuple[Int32s, list[int], list[int]]:
        """Distribute the token budget: one token for each decode row, the rest to prefill rows in order.

        Decode rows never exceed the budget: a request is admitted only if a token is left after one for each row.

        Returns:
            tokens of each row; with shortest first also the slots admitted before some running prefill, and their tokens.
        """
        decode = remaining == 1
        left = self.config.max_batch_tokens - int(np.count_nonzero(decode))
        if self._waiting.shortest_first is not None:
            return self._share_by_turn(slots, remaining, left)
        prefill = np.where(remaining > 1, np.minimum(remaining, self.config.prompt_budget), 0)
        before = np.cumsum(prefill) - prefill
        shared: Int32s = (decode + np.clip(left - before, 0, prefill)).astype(np.int32)
        return shared, [], []

    def _share_by_turn(
        self, slots: Int32s, remaining: Int32s, left: int
    ) -> tuple[Int32s, list[int], list[int]]:
        """Distribute like `share`, with waiting and running prompts ranked in one order."""
        shortest_first = self._waiting.shortest_first
        assert shortest_first is not None, "asked only with shortest prompts first"
        shared = (remaining == 1).astype(np.int32)
        new_slots: list[int] = []
        new_counts: list[int] = []
        lacking = [(row, int(remaining[row])) for row in np.flatnonzero(remaining > 1).tolist()]
        ranks = [
            (shortest_first.rank_of(self._slots.sequence(int(slots[row])), left), row, left)
            for row, left in lacking
        ]
        for rank, row, tokens in sorted(ranks):
            more_slots, more_counts = self._admission.admit(left, before=rank)
            new_slots += more_slots
            new_counts += more_counts
            left -= sum(more_counts)
            shared[row] = min(left, self.config.prompt_budget, tokens)
            left -= int(shared[row])
        return shared, new_slots, new_counts
