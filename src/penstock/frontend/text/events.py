"""Text of an answer as it comes: what every API makes its events of."""

from collections.abc import Sequence

import msgspec

from penstock.frontend.parsing.source import CallDelta
from penstock.frontend.text.prompt_part import PromptPart
from penstock.frontend.text.token_text import TokenText


class TextEvent(
    msgspec.Struct, frozen=True, gc=False
):  # made for every token, in a sixth of a frozen dataclass's time
    """New text of one choice. Its last event has the finish reason.

    The last event also has the routing decisions, if the client asked for them. `text` is for the user; `reasoning` and `calls`
    are there where the answer is parsed, and `cuts_call` says at the end that the last call is not whole. `stopped_by` is the stop string that ended it. The first event has the `prompt`, if the answer says something of it.
    `token_ids` are there where the client asked for them: those of this text and of text held back so far, and the stop token.
    """

    index: int
    text: str
    finish_reason: str | None = None
    logprobs: tuple[TokenText, ...] = ()
    decisions: Sequence[object] = ()
    reasoning: str = ""
    calls: Sequence[CallDelta] = ()
    stopped_by: str | None = None
    prompt: PromptPart | None = None
    token_ids: Sequence[int] | None = None
    cuts_call: bool = False
