"""Answers in the API's shapes."""

import json

import pytest
from tokenizers import Tokenizer

from penstock.core.types.requests import TokenLogprob
from penstock.core.wire import pack_tokens
from penstock.frontend.openai.answers import PromptTokensDetails, Usage
from penstock.frontend.openai.events import Envelope, EventStream, WholeAnswer
from penstock.frontend.text.detokenize import Detokenizer
from penstock.frontend.text.events import TextEvent
from penstock.frontend.text.prompt_part import PromptPart
from penstock.frontend.text.token_text import TokenText
from tests.support.tokenizer import tiny_tokenizer_json

TOKENIZER = Tokenizer.from_buffer(tiny_tokenizer_json())
DETOKENIZER = Detokenizer(TOKENIZER, tiny_tokenizer_json())
TOKEN_BYTES = DETOKENIZER.token_bytes
CHAT = Envelope("chatcmpl-1", 7, "tiny", chat=True)
PLAIN = Envelope("cmpl-1", 7, "tiny", chat=False)
USAGE = Usage(3, 4, 7, PromptTokensDetails(2))
A, PART = TOKENIZER.token_to_id("a"), TOKENIZER.token_to_id("ð")


def parse(events: bytes) -> list[dict]:
    assert events.endswith(b"\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in events.decode().split("\n\n")[:-1]]


def stream(envelope: Envelope, *, include_usage: bool = False) -> EventStream:
    return EventStream(envelope, TOKEN_BYTES, include_usage=include_usage)


def logprob(token_id: int, start: int, *top: tuple[int, float]) -> TokenText:
    return TokenText(TokenLogprob(token_id=token_id, logprob=-0.5, top=top), start)


def test_a_chat_chunk_and_the_one_with_the_role_before_it() -> None:
    encoder = stream(CHAT)
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 7, "model": "tiny"}

    def chunk(delta: dict, reason: str | None = None) -> dict:
        choice = {"index": 1, "delta": delta, "logprobs": None, "finish_reason": reason}
        return {**head, "choices": [choice]}

    role = {"role": "assistant", "content": ""}
    text = 'say "é"\n\u2028'
    assert parse(encoder.event(TextEvent(1, text))) == [chunk(role), chunk({"content": text})]
    assert parse(encoder.event(TextEvent(1, "b", "stop"))) == [chunk({"content": "b"}, "stop")]


def test_token_ids_are_beside_the_text_and_those_of_the_prompt_in_the_first_chunk() -> None:
    prompt = PromptPart(pack_tokens([7, 8]), DETOKENIZER, gives_ids=True)
    first, last = TextEvent(0, "a", prompt=prompt, token_ids=[3]), TextEvent(0, "b", "stop", token_ids=[4, 5])
    for include_usage in (False, True):
        encoder = stream(PLAIN, include_usage=include_usage)
        (one,), (two,) = parse(encoder.event(first)), parse(encoder.event(last))
        assert (one["choices"][0]["token_ids"], one["choices"][0]["prompt_token_ids"]) == ([3], [7, 8])
        assert two["choices"][0] == {
            "index": 0,
            "text": "b",
            "logprobs": None,
            "finish_reason": "stop",
            "token_ids": [4, 5],
        }
        encoder = stream(CHAT, include_usage=include_usage)
        (role, one), (two,) = parse(encoder.event(first)), parse(encoder.event(last))
        assert ("prompt_token_ids" in role, one["prompt_token_ids"], "prompt_token_ids" in two) == (
            False,
            [7, 8],
            False,
        )
        assert (one["choices"][0]["token_ids"], two["choices"][0]["token_ids"]) == ([3], [4, 5])
    thinking = TextEvent(0, "", prompt=prompt, token_ids=[3], reasoning="so")
    _, one = parse(stream(CHAT).event(thinking))
    assert (one["choices"][0]["delta"], one["prompt_token_ids"]) == ({"reasoning_content": "so"}, [7, 8])
    for envelope in (PLAIN, CHAT):
        whole = WholeAnswer(envelope, TOKEN_BYTES, choices=1, logprobs=False)
        whole.take(first)
        whole.take(last)
        answer = json.loads(whole.body(USAGE))
        choice = answer["choices"][0]
        assert choice["token_ids"] == [3, 4, 5]
        assert (answer if envelope.chat else choice)["prompt_token_ids"] == [7, 8]


def test_usage_is_named_in_every_chunk_and_given_in_the_last() -> None:
    encoder = stream(PLAIN, include_usage=True)
    (chunk,) = parse(encoder.event(TextEvent(0, "a")))
    assert chunk["usage"] is None
    last, done = encoder.end(USAGE).split(b"\n\n", 1)
    assert done == b"data: [DONE]\n\n"
    assert stream(PLAIN).end(USAGE) == done
    (last,) = parse(last + b"\n\n")
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7, "prompt_tokens_details": {"cached_tokens": 2},
    }  # fmt: skip


@pytest.mark.parametrize("include_usage", [False, True])
def test_the_chunk_that_ends_a_choice_may_say_why(include_usage: bool) -> None:
    why = ({"request_id": "r"},)
    (chunk,) = parse(stream(PLAIN, include_usage=include_usage).event(TextEvent(0, "a", "stop", (), why)))
    assert chunk["penstock"] == {"decisions": [{"request_id": "r"}]}
    assert chunk["choices"] == [{"index": 0, "text": "a", "logprobs": None, "finish_reason": "stop"}]
    assert ("usage" in chunk) is include_usage


def test_a_whole_answer_says_why_only_if_there_is_something_to_say() -> None:
    for why in ((), ({"request_id": "r"},)):
        answer = WholeAnswer(PLAIN, TOKEN_BYTES, choices=1, logprobs=False)
        answer.take(TextEvent(0, "a", "stop", (), why))
        body = json.loads(answer.body(USAGE))
        assert body.get("penstock") == ({"decisions": [{"request_id": "r"}]} if why else None)
        assert ("penstock" in body) is bool(why)


def test_chat_logprobs() -> None:
    event = TextEvent(0, "a", None, (logprob(A, 0, (A, -0.5), (PART, float("-inf"))),))
    _, chunk = parse(stream(CHAT).event(event))
    top = [
        {"token": "a", "logprob": -0.5, "bytes": [97]},
        {"token": "\ufffd", "logprob": -9999.0, "bytes": [0xF0]},
    ]
    content = [{"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": top}]
    assert chunk["choices"][0]["logprobs"] == {"content": content, "refusal": None}


def test_completion_logprobs() -> None:
    event = TextEvent(0, "aa", None, (logprob(A, 0, (A, -0.5)), logprob(A, 1, (A, -0.5), (PART, -3.0))))
    (chunk,) = parse(stream(PLAIN).event(event))
    assert chunk["choices"][0]["logprobs"] == {
        "tokens": ["a", "a"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"a": -0.5}, {"a": -0.5, "\ufffd": -3.0}],
        "text_offset": [0, 1],
    }
    (chunk,) = parse(stream(PLAIN).event(TextEvent(0, "a", None, (logprob(A, 0),))))
    assert chunk["choices"][0]["logprobs"]["top_logprobs"] is None
