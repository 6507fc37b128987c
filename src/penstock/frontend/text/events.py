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
    `parts` are the same text, reasoning and calls in the order in which the model wrote them, where that is not: reasoning, text,
    calls.
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
    parts: Sequence["TextEvent"] = ()

    @property
    def kinds(self) -> tuple[int, int] | None:
        """The first and the last kind of what it has, in the order of reasoning, text and calls; None: it has nothing."""
        found = [kind for kind, has in enumerate((self.reasoning, self.text, self.calls)) if has]
        return (found[0], found[-1]) if found else None


def merged(events: Sequence[TextEvent]) -> TextEvent:
    """Make one event of a choice's events that follow one another; the first has what is said of the prompt."""
    if len(events) == 1:
        return events[0]
    runs: list[list[TextEvent]] = []
    latest = 0
    for part in (part for event in events for part in (event.parts or (event,))):
        kinds = part.kinds
        if not runs or (kinds is not None and kinds[0] < latest):
            runs.append([])
        runs[-1].append(part)
        latest = latest if kinds is None else kinds[1]
    return _joined(events, tuple(_joined(run) for run in runs) if len(runs) > 1 else ())


def _joined(events: Sequence[TextEvent], parts: Sequence[TextEvent] = ()) -> TextEvent:
    last = events[-1]
    return msgspec.structs.replace(
        events[0],
        text="".join(event.text for event in events),
        finish_reason=last.finish_reason,
        logprobs=tuple(logprob for event in events for logprob in event.logprobs),
        reasoning="".join(event.reasoning for event in events),
        calls=[call for event in events for call in event.calls],
        stopped_by=last.stopped_by,
        cuts_call=last.cuts_call,
        parts=parts,
    )
