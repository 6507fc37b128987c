"""Token masks of the running sequences whose text is constrained."""

from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from penstock.core.errors import EngineError, PenstockError
from penstock.core.types.requests import Request
from penstock.engine.paged.structured.constraint import plain, refusal
from penstock.engine.paged.structured.grammars import Grammars
from penstock.engine.scheduling.sequences import SequenceTable

Bools = NDArray[np.bool_]


class Matchers:
    """One matcher by slot of the `SequenceTable`. One thread owns it.

    A matcher reads the output tokens of its sequence, wherever they were sampled: a sequence that was preempted, or came from
    another worker, goes on as if it had been here from the start.
    """

    def __init__(self, grammars: Grammars, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._grammars = grammars
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._running: dict[int, _Running] = {}
        self._bits = np.zeros(-(-vocab_size // 32), dtype=np.int32)

    def masks(self, table: SequenceTable, slots: NDArray[np.int32]) -> tuple[Bools, dict[int, PenstockError]]:
        """Give what the sequences may go on with.

        Args:
            table: their tokens.
            slots: (n,) slots of sequences with `SamplingParams.structured`.

        Returns:
            (n, vocabulary) bool, and by index errors of sequences that cannot go on; all of their tokens are allowed.
        """
        masks = np.ones((len(slots), self._vocab_size), dtype=np.bool_)
        errors: dict[int, PenstockError] = {}
        for index, slot in enumerate(slots.tolist()):
            try:
                masks[index] = self._mask(table, slot)
            except PenstockError as error:
                errors[index] = error
                self._running.pop(slot, None)
        return masks, errors

    def _mask(self, table: SequenceTable, slot: int) -> Bools:
        request = table.requests[slot]
        assert request is not None, f"slot {slot} is planned but holds no request"
        running = self._running.get(slot)
        if running is None or running.request is not request:
            assert request.sampling.structured is not None, "asked for the mask of a free sequence"
            running = self._running[slot] = _Running(
                request, self._grammars.matcher(request.sampling.structured)
            )
        start, end = int(table.num_prompt[slot]), int(table.num_tokens[slot])
        running.read(table.token_ids[slot, start:end].tolist())
        matcher = running.matcher
        mask: Bools = np.zeros(self._vocab_size, dtype=np.bool_)
        if not matcher.is_stopped():
            matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
            bits = np.unpackbits(self._bits.view(np.uint8), count=self._vocab_size, bitorder="little")
            mask = bits.view(np.bool_)
        if matcher.is_error():
            raise refusal(f"its grammar became too large: {plain(matcher.get_error())}")
        if matcher.is_accepting() or matcher.is_stopped():
            mask[self._eos_token_ids] = True
        return mask


class _Running:
    """The matcher of one sequence, and how many output tokens it has read."""

    def __init__(self, request: Request, matcher: LLMatcher) -> None:
        self.request = request
        self.matcher = matcher
        self._num_read = 0

    def read(self, output: list[int]) -> None:
        """Read what follows.

        Raises:
            EngineError: these tokens do not match the grammar.
        """
        for token_id in output[self._num_read :]:
            if self.matcher.is_stopped():
                break  # only end-of-sequence tokens, below `min_tokens`
            if not self.matcher.consume_token(token_id):
                raise EngineError(
                    f"request {self.request.request_id}: token {token_id} of its output does not match its grammar; was it"
                    " sampled without it?"
                )
        self._num_read = len(output)
