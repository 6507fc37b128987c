"""Reasoning tokens are the same however deltas are merged on their way."""

import random

import pytest
from tokenizers import Tokenizer

from penstock.core.types.requests import Delta, FinishReason, TokenLogprob
from penstock.core.wire import pack_tokens
from penstock.frontend.parsing.families import format_of
from penstock.frontend.parsing.parser import OutputParser, ParserPlan
from penstock.frontend.requests.choice_text import ChoiceText
from penstock.frontend.text.detokenize import Detokenizer
from tests.support.tokenizer import tiny_tokenizer_json

TOKENIZER = Tokenizer.from_buffer(tiny_tokenizer_json())
DETOKENIZER = Detokenizer(TOKENIZER, tiny_tokenizer_json())
FORMAT = format_of("{% if x %}<think>{{ y }}</think><tool_call>{% endif %}")
THOUGHT, ANSWER = "<think>the quick brown 你好</think>", " fox jumps 🎉 over the dog"
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


def told(deltas: list[Delta], stops: tuple[str, ...] = ()) -> tuple[object, ...]:
    """Give everything that one choice says, with its counts."""
    plan = ParserPlan(format=FORMAT, tools={"f": {}})
    choice = ChoiceText(0, DETOKENIZER, stops, begins_text=True, parser=OutputParser(plan))
    text, reasoning, calls, places, reason, raw = "", "", "", [], None, ""
    for delta in deltas:
        event = choice.feed(delta)
        raw += choice.raw
        if event is not None:
            text, reasoning = text + event.text, reasoning + event.reasoning
            calls += "".join((call.name or "") + call.arguments for call in event.calls)
            places += [token.start for token in event.logprobs]
            reason = event.finish_reason
        if choice.finished:
            break
    return text, reasoning, calls, places, reason, choice.output_tokens, choice.reasoning_tokens


def merged(ids: list[int], sizes: list[int]) -> list[Delta]:
    deltas, start = [], 0
    for size in sizes:
        part = ids[start : start + size]
        start += size
        deltas.append(
            Delta(
                request_id="r",
                token_ids=pack_tokens(part),
                logprobs=tuple(TokenLogprob(token, -1.0) for token in part),
                finish_reason=FinishReason.LENGTH if start >= len(ids) else None,
            )
        )
    return deltas


@pytest.mark.parametrize("stops", [(), ("jumps",)])
@pytest.mark.parametrize("rest", [ANSWER, ANSWER + CALL, ""])
def test_they_do_not_depend_on_how_deltas_are_merged(rest: str, stops: tuple[str, ...]) -> None:
    assert FORMAT.reasoning is not None
    ids = TOKENIZER.encode(THOUGHT + rest, add_special_tokens=False).ids
    one_by_one = told(merged(ids, [1] * len(ids)), stops)
    thought = len(TOKENIZER.encode(THOUGHT, add_special_tokens=False).ids)
    assert thought - 1 <= one_by_one[-1] <= thought + 1
    assert one_by_one[1] == "the quick brown 你好"
    draws = random.Random(7)
    for _ in range(30):
        sizes: list[int] = []
        while sum(sizes) < len(ids):
            sizes.append(min(draws.randint(1, 12), len(ids) - sum(sizes)))
        assert told(merged(ids, sizes), stops) == one_by_one
    assert told(merged(ids, [len(ids)]), stops) == one_by_one
