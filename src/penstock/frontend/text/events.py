"""Text of an answer as it comes: what every API makes its events of."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from penstock.core.types.requests import TokenLogprob
from penstock.frontend.parsing.source import CallDelta


@dataclass(frozen=True, slots=True)
class TokenText:
    """One output token with its log-probability; `start` is its character offset in the choice's text."""

    logprob: TokenLogprob
    start: int


class TextEvent(
    msgspec.Struct, frozen=True, gc=False
):  # made for every token, in a sixth of a frozen dataclass's time
    """New text of one choice. Its last event has the finish reason.

    The last event also has the routing decisions, if the client asked for them. `text` is for the user; `reasoning` and `calls`
    are there where the answer is parsed, `stopped_by` is the stop string that ended it.
    """

    index: int
    text: str
    finish_reason: str | None = None
    logprobs: tuple[TokenText, ...] = ()
    decisions: Sequence[object] = ()
    reasoning: str = ""
    calls: Sequence[CallDelta] = ()
    stopped_by: str | None = None
