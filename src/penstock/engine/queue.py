"""The requests that wait for the batch, oldest first."""

from collections import OrderedDict

from penstock.core.ids import RequestId
from penstock.engine.sequences import Sequence


class WaitingQueue:
    """A queue that anyone can leave; a preempted sequence comes back at its front. The scheduler bounds it."""

    def __init__(self) -> None:
        self._sequences: OrderedDict[RequestId, Sequence] = OrderedDict()
        self.num_tokens = 0
        """Tokens that all of them have to compute, as far as no prefix is cached."""

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def first(self) -> Sequence:
        """The oldest; there must be one."""
        return next(iter(self._sequences.values()))

    def push(self, sequence: Sequence) -> None:
        self._sequences[sequence.request.request_id] = sequence
        self.num_tokens += len(sequence.token_ids)

    def push_front(self, sequence: Sequence) -> None:
        self.push(sequence)
        self._sequences.move_to_end(sequence.request.request_id, last=False)

    def remove(self, sequence: Sequence) -> None:
        del self._sequences[sequence.request.request_id]
        self.num_tokens -= len(sequence.token_ids)

    def check(self) -> None:
        """Raise AssertionError where the state contradicts itself."""
        waiting = list(self._sequences.values())
        assert self.num_tokens == sum(len(sequence.token_ids) for sequence in waiting), (
            "tokens are miscounted"
        )
        arrivals = [sequence.arrival for sequence in waiting]
        assert arrivals == sorted(arrivals), "an older request waits behind a newer one"
        assert all(sequence.slot is None for sequence in waiting), "a waiting request has a slot"
