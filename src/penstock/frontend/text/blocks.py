"""An answer as blocks, one after another: reasoning, text, tool calls. APIs whose streams open and close items are made of them."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from io import StringIO

from penstock.frontend.text.events import TextEvent
from penstock.frontend.text.token_text import TokenText


class Kind(Enum):
    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


class Step(Enum):
    OPENED = "opened"
    ADDED = "added"
    CLOSED = "closed"


@dataclass(slots=True)
class Block:
    """One block: `call` is a call's number, `logprobs` are of a text's tokens."""

    index: int
    kind: Kind
    name: str = ""
    call: int = 0
    logprobs: list[TokenText] = field(default_factory=list)
    _written: StringIO = field(default_factory=StringIO)
    """An answer may have 100,000 pieces, and a text as long is not copied for each."""

    @property
    def text(self) -> str:
        """All of it so far, of a tool call its arguments."""
        return self._written.getvalue()

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
        cut = self.cuts_call and next(block for block in reversed(self.all) if block.kind is Kind.CALL)
        return [block for block in self.all if block is not cut]

    def feed(self, event: TextEvent) -> Iterator[tuple[Step, Block, str]]:
        """Take an event; yields what happens to which block, with the text that was added."""
        for part in event.parts or (event,):
            yield from self._take(part)
        if event.finish_reason is not None:
            self.finish_reason, self.stopped_by = event.finish_reason, event.stopped_by
            self.cuts_call = event.cuts_call
            yield from self._close()

    def _take(self, event: TextEvent) -> Iterator[tuple[Step, Block, str]]:
        """Take what an event, or a part of one, has: first reasoning, then text, then calls."""
        if event.reasoning:
            yield from self._add(Kind.REASONING, event.reasoning)
        if event.text:
            yield from self._add(Kind.TEXT, event.text, event.logprobs)
        for call in event.calls:
            if call.name is not None:
                yield from self._close()
                yield from self._open(Block(len(self.all), Kind.CALL, name=call.name, call=call.index))
            if call.arguments:
                yield from self._add(Kind.CALL, call.arguments)

    def _add(
        self, kind: Kind, text: str, logprobs: Iterable[TokenText] = ()
    ) -> Iterator[tuple[Step, Block, str]]:
        if not self._is_open or self.all[-1].kind is not kind:
            yield from self._close()
            text = text.lstrip() if kind is Kind.TEXT and self.all else text  # what keeps texts apart
            yield from self._open(Block(len(self.all), kind))
        block = self.all[-1]
        block.add(text, logprobs)
        yield Step.ADDED, block, text

    def _open(self, block: Block) -> Iterator[tuple[Step, Block, str]]:
        self.all.append(block)
        self._is_open = True
        yield Step.OPENED, block, ""

    def _close(self) -> Iterator[tuple[Step, Block, str]]:
        if self._is_open:
            self._is_open = False
            yield Step.CLOSED, self.all[-1], ""
