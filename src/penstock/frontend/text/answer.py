"""The internal answer: text events of choices as they come, and the blocks that they add up to. Every API writes its answers from these."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from io import StringIO
from math import nan
from typing import Any, NamedTuple

import msgspec
import numpy as np

from penstock.core.types.requests import PromptLogprobs, TokenLogprob
from penstock.core.wire import PackedTokens, token_list, unpack_tokens
from penstock.frontend.text.source import CallDelta
from penstock.frontend.text.tokens import Detokenizer


@dataclass(frozen=True, slots=True)
class TokenText:
    """A token with its log-probability; `start` is its character offset in the choice's text."""

    logprob: TokenLogprob
    start: int


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
        """Give each token but the first, with at most `alternatives` alternatives."""
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


class BlockKind(Enum):
    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


class BlockStep(Enum):
    OPENED = "opened"
    ADDED = "added"
    CLOSED = "closed"


@dataclass(slots=True)
class Block:
    """One block: `call` is a call's number, `logprobs` are of a text's tokens."""

    index: int
    kind: BlockKind
    name: str = ""
    call: int = 0
    logprobs: list[TokenText] = field(default_factory=list)
    _written: StringIO = field(default_factory=StringIO)
    """An answer may have 100,000 pieces, and a text as long is not copied for each."""

    @property
    def text(self) -> str:
        """The text so far; of a tool call the arguments so far."""
        return self._written.getvalue()

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of a tool call; empty where its text is no JSON object, as of a cut answer."""
        try:
            decoded = msgspec.json.decode(self.text)
        except (ValueError, RecursionError):
            return {}
        return decoded if isinstance(decoded, dict) else {}

    def add(self, text: str, logprobs: Iterable[TokenText]) -> None:
        """Take more text, and the log-probabilities of its tokens."""
        self._written.write(text)
        self.logprobs += logprobs


class Blocks:
    """Makes the blocks of one choice."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self.finish_reason: str | None = None
        self.stopped_by: str | None = None
        self.cuts_call = False
        """Whether the answer ended within its last call."""
        self._is_open = False

    @property
    def whole(self) -> list[Block]:
        """All blocks but the call in which the answer ended."""
        cut = self.cuts_call and next(block for block in reversed(self.all) if block.kind is BlockKind.CALL)
        return [block for block in self.all if block is not cut]

    def feed(self, event: TextEvent) -> Iterator[tuple[BlockStep, Block, str]]:
        """Take an event; yields what happens to which block, with the text that was added."""
        for part in event.parts or (event,):
            yield from self._take(part)
        if event.finish_reason is not None:
            self.finish_reason, self.stopped_by = event.finish_reason, event.stopped_by
            self.cuts_call = event.cuts_call
            yield from self._close()

    def _take(self, event: TextEvent) -> Iterator[tuple[BlockStep, Block, str]]:
        """Take what an event, or a part of one, has: first reasoning, then text, then calls."""
        if event.reasoning:
            yield from self._add(BlockKind.REASONING, event.reasoning)
        if event.text:
            yield from self._add(BlockKind.TEXT, event.text, event.logprobs)
        for call in event.calls:
            if call.name is not None:
                yield from self._close()
                yield from self._open(Block(len(self.all), BlockKind.CALL, name=call.name, call=call.index))
            if call.arguments:
                yield from self._add(BlockKind.CALL, call.arguments)

    def _add(
        self, kind: BlockKind, text: str, logprobs: Iterable[TokenText] = ()
    ) -> Iterator[tuple[BlockStep, Block, str]]:
        if not self._is_open or self.all[-1].kind is not kind:
            yield from self._close()
            text = text.lstrip() if kind is BlockKind.TEXT and self.all else text  # what keeps texts apart
            yield from self._open(Block(len(self.all), kind))
        block = self.all[-1]
        block.add(text, logprobs)
        yield BlockStep.ADDED, block, text

    def _open(self, block: Block) -> Iterator[tuple[BlockStep, Block, str]]:
        self.all.append(block)
        self._is_open = True
        yield BlockStep.OPENED, block, ""

    def _close(self) -> Iterator[tuple[BlockStep, Block, str]]:
        if self._is_open:
            self._is_open = False
            yield BlockStep.CLOSED, self.all[-1], ""
