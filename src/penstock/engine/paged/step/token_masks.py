"""Which tokens rows may go on with: by grammars, `allowed_token_ids` and `bad_words`."""

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import PenstockError, RequestError
from penstock.core.types.requests import SamplingParams
from penstock.engine.paged.structured.matchers import Matchers
from penstock.engine.scheduling.sequences import SequenceTable

Bools = NDArray[np.bool_]


class TokenMasks:
    """Makes the masks of a step. One thread owns it."""

    def __init__(self, vocab_size: int, matchers: Matchers | None = None) -> None:
        """Make it.

        Args:
            vocab_size: of the logits.
            matchers: of constrained requests; None where the engine takes none.
        """
        self._vocab_size = vocab_size
        self._matchers = matchers
        self._limits: dict[int, _Limits] = {}  # by slot, of the rows of the last step

    def masks(self, table: SequenceTable, slots: NDArray[np.int32]) -> tuple[Bools, dict[int, PenstockError]]:
        """Give what sequences may go on with.

        Args:
            table: their tokens.
            slots: (n,) slots of sequences for which `is_masked` holds.

        Returns:
            (n, vocabulary) bool, and by index errors of sequences that cannot go on; all of their tokens are allowed.
        """
        params = [
            request.sampling for slot in slots.tolist() if (request := table.requests[slot]) is not None
        ]
        constrained = np.flatnonzero([each.structured is not None for each in params])
        masks = np.ones((len(slots), self._vocab_size), dtype=np.bool_)
        errors: dict[int, PenstockError] = {}
        if len(constrained):
            assert self._matchers is not None, "a constrained request, and the engine takes none"
            masks[constrained], failed = self._matchers.masks(table, slots[constrained])
            errors = {int(constrained[index]): error for index, error in failed.items()}
        known: dict[int, _Limits] = {}
        for index, (slot, each) in enumerate(zip(slots.tolist(), params, strict=True)):
            if not (each.allowed_token_ids or each.bad_words) or index in errors:
                continue
            limits = self._limits.get(slot)
            if limits is None or limits.sampling is not each:
                limits = _Limits(each, self._vocab_size)
            known[slot] = limits
            limits.apply(masks[index], table.token_ids[slot, table.num_prompt[slot] : table.num_tokens[slot]])
            if not masks[index].any():
                masks[index] = True
                errors[index] = RequestError(
                    "allowed_token_ids: leave no token that bad_words and response_format allow; allow more",
                    param="allowed_token_ids",
                )
        self._limits = known
        return masks, errors


def is_masked(sampling: SamplingParams) -> bool:
    """Say whether some tokens may not be sampled."""
    return bool(sampling.structured is not None or sampling.allowed_token_ids or sampling.bad_words)


class _Limits:
    """A request's `allowed_token_ids` and `bad_words`, read once: a step has to take little time for each row."""

    def __init__(self, sampling: SamplingParams, vocab_size: int) -> None:
        self.sampling = sampling
        self._allowed = np.full(vocab_size, not sampling.allowed_token_ids)
        self._allowed[list(sampling.allowed_token_ids)] = True
        self._endings: dict[int, list[tuple[int, ...]]] = {}  # words by their last token but one
        for word in sampling.bad_words:
            if len(word) == 1:
                self._allowed[word[0]] = False
            else:
                self._endings.setdefault(word[-2], []).append(word)

    def apply(self, mask: Bools, output: NDArray[np.int32]) -> None:
        """Take from a (vocabulary,) mask what is not allowed after the output."""
        mask &= self._allowed
        for word in self._endings.get(int(output[-1]), ()) if len(output) else ():
            before = len(word) - 1
            if before <= len(output) and output[len(output) - before :].tolist() == list(word[:-1]):
                mask[word[-1]] = False
