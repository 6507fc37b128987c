"""What an answer says of its prompt: its text, and the log-probabilities of its tokens."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import nan
from typing import NamedTuple

import numpy as np

from penstock.core.types.requests import PromptLogprobs, TokenLogprob
from penstock.core.wire import PackedTokens, token_list, unpack_tokens
from penstock.frontend.text.detokenize import Detokenizer
from penstock.frontend.text.token_text import TokenText

_ID_BYTES = 8  # six digits and a comma, of most vocabularies


class PromptToken(NamedTuple):
    """A prompt token's log-probability and rank, and the most likely tokens with theirs."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class PromptPart:
    """The prompt of one choice.

    Attributes:
        token_ids: of the prompt.
        detokenizer: of the model.
        text: goes before the answer's own; empty if the prompt is not echoed.
        text_bytes: of `text` as a JSON string.
        echoed: alternatives at each echoed token; None: no log-probabilities are echoed.
        listed: alternatives in `prompt_logprobs` of the answer; None: it has none.
        gives_ids: whether the answer has `prompt_token_ids`.
        logprobs: as the engine gave them, each after the one before.
    """

    token_ids: PackedTokens
    detokenizer: Detokenizer
    text: str = ""
    text_bytes: int = 0
    echoed: int | None = None
    listed: int | None = None
    gives_ids: bool = False
    logprobs: tuple[PromptLogprobs, ...] = ()

    @property
    def asked(self) -> int | None:
        """Alternatives to ask of the engine; None: no log-probabilities."""
        return max((count for count in (self.echoed, self.listed) if count is not None), default=None)

    @property
    def ids_bytes(self) -> int:
        """Length of its token ids as JSON, at most, if the answer has them."""
        return _ID_BYTES * (len(self.token_ids) >> 2) if self.gives_ids else 0

    @property
    def num_values(self) -> int:
        """Log-probabilities in the answer."""
        return 0 if self.asked is None else (1 + self.asked) * (len(self.token_ids) >> 2)

    def tokens(self, alternatives: int) -> Iterator[PromptToken]:
        """Give each token but the first, with at most so many alternatives."""
        for part in self.logprobs:
            ranks = token_list(part.ranks)
            ids = unpack_tokens(part.token_ids).reshape(len(ranks), -1).tolist()
            values = np.frombuffer(part.logprobs, dtype="<f4").reshape(len(ranks), -1).tolist()
            for row, rank in enumerate(ranks):
                top = zip(ids[row][1 : 1 + alternatives], values[row][1 : 1 + alternatives], strict=True)
                yield PromptToken(ids[row][0], values[row][0], rank, tuple(top))

    def echoed_tokens(self) -> list[TokenText]:
        """Give all tokens with their places in the text; the first one's log-probability is NaN. Empty if none are echoed."""
        if self.echoed is None:
            return []
        decoder, start, texts = self.detokenizer.stream(begins_text=True), 0, []
        first = token_list(self.token_ids[:4])[0]
        for token in (PromptToken(first, nan, 0, ()), *self.tokens(self.echoed)):
            texts.append(TokenText(TokenLogprob(token.token_id, token.logprob, token.top), start))
            start += len(decoder.feed((token.token_id,)))
        return texts
