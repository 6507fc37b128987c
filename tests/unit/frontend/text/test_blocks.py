"""Blocks of an answer: opened, filled and closed one after another."""

from penstock.frontend.parsing.source import CallDelta
from penstock.frontend.text.blocks import Blocks, Kind
from penstock.frontend.text.events import TextEvent


def steps(blocks: Blocks, event: TextEvent) -> list[tuple[str, int, str]]:
    return [(step.value, block.index, text) for step, block, text in blocks.feed(event)]


def test_each_kind_of_text_has_a_block_that_closes_before_the_next_opens() -> None:
    blocks = Blocks()
    assert steps(blocks, TextEvent(0, "", reasoning="hm")) == [("opened", 0, ""), ("added", 0, "hm")]
    both = TextEvent(0, "so", reasoning="m")
    assert steps(blocks, both) == [
        ("added", 0, "m"),
        ("closed", 0, ""),
        ("opened", 1, ""),
        ("added", 1, "so"),
    ]
    calls = [CallDelta(0, "f", "{"), CallDelta(0, None, "}"), CallDelta(1, "g")]
    assert steps(blocks, TextEvent(0, "", calls=calls)) == [
        ("closed", 1, ""), ("opened", 2, ""), ("added", 2, "{"), ("added", 2, "}"), ("closed", 2, ""), ("opened", 3, ""),
    ]  # fmt: skip
    end = TextEvent(0, "", "stop", stopped_by="x", calls=[CallDelta(1, None, "{}")])
    assert steps(blocks, end) == [("added", 3, "{}"), ("closed", 3, "")]
    assert [(block.kind, block.text, block.name) for block in blocks.all] == [
        (Kind.REASONING, "hmm", ""), (Kind.TEXT, "so", ""), (Kind.CALL, "{}", "f"), (Kind.CALL, "{}", "g"),
    ]  # fmt: skip
    assert (blocks.finish_reason, blocks.stopped_by) == ("stop", "x")


def test_an_answer_without_text_has_no_blocks() -> None:
    blocks = Blocks()
    assert steps(blocks, TextEvent(0, "", "length")) == []
    assert blocks.all == []


class Piece(str):
    """Counts the characters to which it is appended."""

    __slots__ = ()
    copied = 0

    def __radd__(self, before: str) -> str:
        Piece.copied += len(before)
        return f"{before}{self}"


def test_a_text_is_not_copied_for_each_of_its_pieces() -> None:
    blocks = Blocks()
    for _ in range(1000):
        steps(blocks, TextEvent(0, Piece("écrit ")))
    (block,) = blocks.all
    assert (block.text, Piece.copied) == ("écrit " * 1000, 0)
