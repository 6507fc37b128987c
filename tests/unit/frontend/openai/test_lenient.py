"""Bodies with what has no effect: accepted and named in the log, unless the client wants to know."""

import json
from typing import Any

import pytest

from penstock.core.errors import RequestError
from penstock.frontend.openai import lenient
from penstock.frontend.openai.agents import AgentHintsBody, SessionBody
from penstock.frontend.openai.bodies import ChatRequest, ContinuationBody, parse_chat, parse_completion


def parse(**fields: Any) -> ChatRequest:
    messages = [{"role": "user", "content": "hi"}]
    return parse_chat(json.dumps({"model": "m", "messages": messages, **fields}).encode())


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    names: set[str] = set()
    monkeypatch.setattr(lenient, "_named", names)
    return names


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("guided_decoding_disable_fallback", None),
        ("use_beam_search", False),
        ("new_thing", 0),
        ("new_thing", ""),
        ("new_thing", []),
        ("new_thing", {}),
        ("skip_special_tokens", True),
        ("request_id", "r-1"),
        ("length_penalty", 1.5),
        ("rid", "r-1"),
        ("best_of", 1),
        ("typical_p", 1.0),
    ],
)
def test_an_unknown_field_without_effect_is_accepted_and_named(
    named: set[str], field: str, value: Any
) -> None:
    assert parse(**{field: value}, max_tokens=3).max_tokens == 3
    assert named == {field}
    with pytest.raises(RequestError) as caught:
        parse(**{field: value}, strict=True)
    assert caught.value.param == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_beam_search", True),
        ("skip_special_tokens", False),
        ("max_tokns", 5),
        ("best_of", 2),
        ("new_thing", "x"),
    ],
)
def test_an_unknown_field_with_an_effect_is_refused_by_name(named: set[str], field: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        parse(**{field: value}, guided_decoding_disable_fallback=None)
    assert caught.value.param == field


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        (
            "skip_special_tokens",
            False,
            "skip_special_tokens: only true is served here, got false; leave it out",
        ),
        ("typical_p", 0.5, "typical_p: only 1 is served here, got 0.5; leave it out"),
        ("use_beam_search", True, "use_beam_search: not supported by this server; leave it out"),
        ("truncate_prompt_tokens", 5, "truncate_prompt_tokens: not supported by this server; leave it out"),
        ("best_of", [[7]], "best_of: only 1 is served here, got an array; leave it out"),
        ("max_tokns", 5, "max_tokns: unknown field; did you mean 'max_tokens'?"),
        ("", 5, "'': unknown field"),
    ],
)
def test_a_field_of_another_server_is_no_misspelt_one(field: str, value: Any, says: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse(**{field: value})
    assert (caught.value.message, caught.value.param) == (says, field)


@pytest.mark.parametrize("value", ["[" * 900 + "]" * 900, "7" * 5000, '"' + "a" * 100_000 + '"'])
def test_a_value_of_any_size_is_refused_in_few_words(value: str) -> None:
    body = (
        f'{{"model": "m", "messages": [{{"role": "user", "content": "a"}}], "skip_special_tokens": {value}}}'
    )
    with pytest.raises(RequestError) as caught:
        parse_chat(body.encode())
    assert len(caught.value.message) < 200


def test_fields_of_nested_objects_may_be_unknown_too(named: set[str]) -> None:
    body = parse(
        stream=True, stream_options={"include_usage": True, "later": None, "other": False}, nvext={"seen": []}
    )
    assert body.stream_options is not None
    assert body.stream_options.include_usage
    assert named == {"stream_options.later", "stream_options.other", "nvext.seen"}


def test_whole_numbers_may_be_written_as_floats(named: set[str]) -> None:
    body = parse(max_tokens=4.0, top_k=50.0, seed=1.0, temperature=1.0)
    assert (body.max_tokens, body.top_k, body.seed, body.temperature) == (4, 50, 1, 1.0)
    assert named == set()
    with pytest.raises(RequestError, match=r"max_tokens: must be a whole number, got 4\.5"):
        parse(max_tokens=4.5)


def test_whole_numbers_and_null_are_taken_at_any_depth(named: set[str]) -> None:
    fields = {
        "prompt": [5.0, 6],
        "stop_token_ids": [3.0],
        "continuation": {"num_emitted": 1.0, "choice": None},
        "agent_hints": {"osl": 4.0, "speculative_prefill": None},
        "session": {"id": "s", "ephemeral": None},
    }
    body = parse_completion(json.dumps({"model": "m"} | fields).encode())
    assert (body.prompt, body.stop_token_ids) == ([5, 6], [3])
    assert (body.continuation, body.session) == (ContinuationBody(num_emitted=1), SessionBody(id="s"))
    assert body.agent_hints == AgentHintsBody(osl=4)
    assert named == set()
    for wrong, says in (
        ({"num_emitted": None}, "expected integer, got null"),
        ({"num_emitted": 0.5}, "whole"),
    ):
        with pytest.raises(RequestError, match=rf"continuation\.num_emitted: .*{says}"):
            parse_completion(json.dumps({"model": "m", "prompt": [5], "continuation": wrong}).encode())


def test_the_names_in_the_log_are_bounded(named: set[str]) -> None:
    parse(**{f"odd{index}": None for index in range(1000)})
    assert len(named) == lenient._NAMED_MAX
