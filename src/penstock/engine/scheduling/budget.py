"""The token budget of a step: who computes how many tokens in it."""

import numpy as np

from penstock.engine.scheduling.admission import Admission
from penstock.engine.scheduling.config import SchedulerConfig
from penstock.engine.scheduling.order.waiting_queue import WaitingQueue
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

    @property
    def limits(self) -> tuple[int, int]:
        """Most tokens of the next step, and of one prompt in it."""
        return self.config.step_limits(self._waiting.turn_tokens)

    def share(self, slots: Int32s, remaining: Int32s) -> tuple[Int32s, list[int], list[int]]:
        """Distribute the token budget: one token for each decode row, the rest to prefill rows in order.

        Decode rows never exceed the budget: a request is admitted only if a token is left after one for each row.

        Returns:
            tokens of each row; where prompts are ranked also the slots admitted before some running prefill, and their tokens.
        """
        decode = remaining == 1
        left = self.limits[0] - int(np.count_nonzero(decode))
        if self._waiting.ranked is not None:
            return self._share_by_turn(slots, remaining, left)
        prefill = np.where(remaining > 1, np.minimum(remaining, self.config.prompt_budget), 0)
        before = np.cumsum(prefill) - prefill
        shared: Int32s = (decode + np.clip(left - before, 0, prefill)).astype(np.int32)
        return shared, [], []

    def _share_by_turn(
        self, slots: Int32s, remaining: Int32s, left: int
    ) -> tuple[Int32s, list[int], list[int]]:
        """Distribute like `share`, with waiting and running prompts ranked in one order."""
        ranked = self._waiting.ranked
        assert ranked is not None, "asked only where prompts are ranked"
        order, (_, prompt_budget) = ranked.order, self.limits
        shared = (remaining == 1).astype(np.int32)
        new_slots: list[int] = []
        new_counts: list[int] = []
        lacking = [(row, int(remaining[row])) for row in np.flatnonzero(remaining > 1).tolist()]
        if not lacking and not self._waiting:
            order.on_idle()
        sequences = [self._slots.sequence(int(slots[row])) for row, _ in lacking]
        ranks = [
            (order.rank(sequence, tokens), row, tokens, sequence)
            for sequence, (row, tokens) in zip(sequences, lacking, strict=True)
        ]
        for rank, row, tokens, sequence in sorted(ranks, key=lambda each: each[:2]):
            more_slots, more_counts = self._admission.admit(left, before=rank)
            new_slots += more_slots
            new_counts += more_counts
            left -= sum(more_counts)
            shared[row] = min(left, prompt_budget, tokens)
            left -= int(shared[row])
            order.note(sequence, tokens - int(shared[row]))
        return shared, new_slots, new_counts
