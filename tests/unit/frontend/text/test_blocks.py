"""Blocks of an answer: opened, filled and closed one after another."""

import time

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


def test_a_long_answer_takes_linear_time() -> None:
    def taken_s(count: int) -> float:
        blocks, begun_s = Blocks(), time.process_time()
        for _ in range(count):
            steps(blocks, TextEvent(0, "écrit "))
        (block,) = blocks.all
        assert block.text == "écrit " * count
        return time.process_time() - begun_s

    few_s = max(taken_s(10_000), taken_s(10_000))
    assert taken_s(160_000) < 100 * few_s, "16 times as many; quadratic time would be over 200 times"


def test_an_answer_without_text_has_no_blocks() -> None:
    blocks = Blocks()
    assert steps(blocks, TextEvent(0, "", "length")) == []
    assert blocks.all == []
