"""What other servers' sampling fields mean in the APIs that do not have them themselves."""

import json

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
