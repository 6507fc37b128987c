"""The requests that wait for the batch, in order of turn: as they came, or the shortest first."""

from collections import OrderedDict
from collections.abc import Callable

from penstock.core.ids import RequestId
from penstock.engine.sequences import Sequence
from penstock.engine.turns import Turns


class WaitingQueue:
    """A queue that anyone can leave; a preempted sequence comes back at its front. The scheduler bounds it."""

    def __init__(self) -> None:
        self.num_tokens = 0
        """Tokens that all of them have to compute, as far as no prefix is cached."""
        self.turns: Turns[Sequence] | None = None
        """Whose turn it is; None while they go as they came."""
        self._sequences: OrderedDict[RequestId, Sequence] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def first(self) -> Sequence:
        """The one whose turn it is; there must be one, and ranked."""
        return next(iter(self._sequences.values())) if self.turns is None else self.turns.first

    def reorder(self, turns: Turns[Sequence] | None) -> None:
        """Go by other turns, which nobody has yet, from now on; None is as they came."""
        self.turns = turns
        waiting = sorted(self._sequences.values(), key=lambda sequence: sequence.arrival)
        self._sequences = OrderedDict((sequence.request.request_id, sequence) for sequence in waiting)
        if turns is not None:
            for sequence in waiting:
                turns.come(sequence)

    def push(self, sequence: Sequence) -> None:
        self._add(sequence)
        if self.turns is not None:
            self.turns.come(sequence)

    def push_front(self, sequence: Sequence) -> None:
        self._add(sequence)
        self._sequences.move_to_end(sequence.request.request_id, last=False)
        if self.turns is not None:
            self.turns.come_back(sequence)

    def rank_new(self, count: Callable[[Sequence], int]) -> None:
        """See whose turn it is, also of those that came last; `count` says how many tokens each lacks."""
        if self.turns is not None:
            self.turns.rank_new(count)

    def remove(self, sequence: Sequence) -> None:
        del self._sequences[sequence.request.request_id]
        self.num_tokens -= len(sequence.token_ids)
        if self.turns is not None:
            self.turns.leave(sequence)

    def check(self) -> None:
        """Raise AssertionError where the state contradicts itself."""
        waiting = list(self._sequences.values())
        assert self.num_tokens == sum(len(sequence.token_ids) for sequence in waiting), (
            "tokens are miscounted"
        )
        assert all(sequence.slot is None for sequence in waiting), "a waiting request has a slot"
        if self.turns is not None:
            self.turns.check()
            return
        arrivals = [sequence.arrival for sequence in waiting]
        assert arrivals == sorted(arrivals), "an older request waits behind a newer one"

    def _add(self, sequence: Sequence) -> None:
        self._sequences[sequence.request.request_id] = sequence
        self.num_tokens += len(sequence.token_ids)
