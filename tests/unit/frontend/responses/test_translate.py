"""What the bodies of other APIs become: their fields, and bodies with many tool calls."""

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

from penstock.frontend.anthropic.translate import parse_messages
from penstock.frontend.responses.translate import parse_responses

EXTENSIONS = {
    "top_k": 3,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "min_tokens": 2,
    "ignore_eos": True,
    "stop_token_ids": [7],
    "cache_salt": "s",
    "priority": -1,
    "seed": 5,
}


@pytest.mark.parametrize(
    ("parse", "fields"),
    [
        (parse_responses, {"input": "hello"}),
        (parse_messages, {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 9}),
    ],
)
def test_sampling_fields_of_vllm_reach_the_request(parse, fields: dict) -> None:
    request = parse(json.dumps({"model": "tiny"} | fields | EXTENSIONS).encode()).request
    assert {name: getattr(request, name) for name in EXTENSIONS} == EXTENSIONS


def responses_calls(count: int) -> dict[str, Any]:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    return {"input": [{"role": "user", "content": "hello"}, *[call] * count]}


def anthropic_calls(count: int) -> dict[str, Any]:
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    return {"messages": [{"role": "assistant", "content": [call] * count}], "max_tokens": 9}


@pytest.mark.parametrize(
    ("parse", "fields"), [(parse_responses, responses_calls), (parse_messages, anthropic_calls)]
)
def test_each_of_many_calls_of_one_turn_takes_as_many_steps(
    parse: Callable[[bytes], Any], fields: Callable[[int], dict[str, Any]]
) -> None:
    def steps(count: int) -> int:
        """Count the lines that Python runs."""
        body = json.dumps({"model": "tiny"} | fields(count)).encode()
        lines = 0

        def trace(_frame: object, event: str, _argument: object) -> Any:
            nonlocal lines
            lines += event == "line"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            calls = parse(body).request.messages[-1].tool_calls
        finally:
            sys.settrace(before)
        assert len(calls) == count
        return lines

    first, second = steps(2000) - steps(1000), steps(4000) - steps(3000)
    assert 0 < second < 1.5 * first, "a quadratic time would take three times as many"
