"""Requests and answers of each language, as its documentation shows them."""

import msgspec
import pytest

from penstock.core.errors import EngineError, RequestError, StepFailed
from penstock.core.ids import RequestId
from penstock.core.types.instances import CLIENT_SALT
from penstock.core.types.requests import FinishReason, Request, SamplingParams
from penstock.core.wire import pack_tokens
from penstock.engine.openai.apis.api import AnswerPiece
from penstock.engine.openai.apis.completions import Completions
from penstock.engine.openai.apis.llamacpp import LlamaCpp
from penstock.engine.openai.apis.ollama import Ollama
from penstock.engine.openai.apis.sglang import SglangGenerate
from penstock.engine.openai.connection import error_text


def request_of(*, num_emitted: int = 0, salt: bytes = b"", choice: int = 0, **sampling) -> Request:
    return Request(
        request_id=RequestId("r"), model="m", token_ids=pack_tokens([1, 2, 3]), num_emitted=num_emitted, salt=salt,
        choice=choice, sampling=SamplingParams(**{"max_tokens": 10} | sampling),
    )  # fmt: skip


def test_vllm_gets_constraints_and_does_not_go_on_within_one():
    api = Completions("m", "vllm")
    limits = {
        "structured": b'{"json":{"type":"object"}}',
        "logit_bias": ((7, -1.5),),
        "allowed_token_ids": (7, 8),
    }
    body = msgspec.json.decode(msgspec.json.encode(api.body(request_of(**limits), [1, 2, 3])))
    assert body["structured_outputs"] == {"json": {"type": "object"}}
    assert body["logit_bias"] == {"7": -1.5}
    assert body["allowed_token_ids"] == [7, 8]
    with pytest.raises(EngineError, match="cannot continue"):
        api.body(request_of(num_emitted=2, **limits), [1, 2, 3])
    others = (Completions("m", "text"), Completions("m", "trtllm"), LlamaCpp(), SglangGenerate(), Ollama("m"))
    assert api.constrains
    assert not any(other.constrains for other in others)


def test_another_deployment_goes_on_as_a_worker_here_would():
    api = Completions("m", "penstock")
    limits = {"structured": b'{"json":{"type":"object"}}', "seed": 5, "seed_drawn": True, "logprobs": 2}
    body = msgspec.json.decode(
        msgspec.json.encode(api.body(request_of(num_emitted=2, choice=3, **limits), [1, 2, 3]))
    )
    assert body["continuation"] == {"num_emitted": 2, "choice": 3}
    assert (body["seed"], body["max_tokens"], body["return_tokens_as_token_ids"]) == (5, 8, True)
    assert body["structured_outputs"] == {"json": {"type": "object"}}, "it goes on within it"
    assert (body["top_k"], body["min_p"], body["repetition_penalty"]) == (0, 0.0, 1.0)
    assert api.headers == {"X-Penstock-Forwarded": "1"}
    long = request_of(salt=b"m" + CLIENT_SALT + b"x" * 300)
    assert len(api.body(long, [1])["cache_salt"]) == 32
    assert (
        api.body(long, [1])["cache_salt"]
        != api.body(request_of(salt=b"m" + CLIENT_SALT + b"x"), [1])["cache_salt"]
    )


def test_a_plain_server_gets_no_fields_but_openais_own():
    body = Completions("m", "text").body(request_of(presence_penalty=0.5), "hello")
    assert body.keys() == {
        "model", "prompt", "max_tokens", "temperature", "top_p", "presence_penalty", "stream", "stream_options",
    }  # fmt: skip
    with pytest.raises(RequestError, match="logprobs"):
        Completions("m", "text").body(request_of(logprobs=1), "hello")


def test_choices_and_continuations_have_seeds_of_their_own():
    seeds = {
        Completions("m", "vllm").body(request_of(seed=5, choice=choice, num_emitted=emitted), [])["seed"]
        for choice in range(3)
        for emitted in range(3)
    }
    assert len(seeds) == 9
    assert "seed" not in Completions("m", "vllm").body(request_of(), [])
    assert 0 <= Ollama("m").body(request_of(seed=(1 << 63) - 1, choice=9), "x")["options"]["seed"] < 1 << 31


@pytest.mark.parametrize(
    ("api", "sampling"),
    [
        (LlamaCpp(), {"min_tokens": 3}), (LlamaCpp(), {"stop_token_ids": (4,)}), (Ollama("m"), {"logprobs": 0}),
        (Ollama("m"), {"ignore_eos": True}), (Ollama("m"), {"stop_token_ids": (4,)}),
    ],
)  # fmt: skip
def test_what_a_server_has_no_field_for_is_refused(api, sampling):
    with pytest.raises(RequestError, match=next(iter(sampling))):
        api.body(request_of(**sampling), "")


def test_ollamas_end():
    answer = Ollama("m").answer(request_of())
    assert answer.read(b'{"response":"hi","done":false}') == AnswerPiece(text="hi")
    assert answer.read(b'{"response":"","done":true,"done_reason":"stop"}').finish_reason is FinishReason.STOP
    with pytest.raises(StepFailed, match="no part of an answer"):
        answer.read(b'{"models": []}')


def test_errors_within_a_stream():
    answer = Completions("m", "vllm").answer(request_of())
    with pytest.raises(RequestError, match="too long"):
        answer.read(b'data: {"error": {"message": "too long", "code": 400}}')
    with pytest.raises(StepFailed, match="CUDA"):
        answer.read(b'data: {"error": {"message": "CUDA error", "type": "InternalServerError", "code": 500}}')
    with pytest.raises(StepFailed, match="abort"):
        answer.read(b'data: {"choices": [{"text": "", "token_ids": [], "finish_reason": "abort"}]}')


@pytest.mark.parametrize(
    ("api", "line", "piece"),
    [
        (Completions("m", "vllm"), b'data: {"choices": null, "usage": {"prompt_tokens_details": {"cached_tokens": 2}}}', AnswerPiece(cached_tokens=2)),
        (Completions("m", "vllm"), b'data: {"choices": null, "usage": null}', None),
        (Completions("m", "vllm"), b'data: {"choices": [], "usage": {"prompt_tokens_details": null}}', None),
        (Completions("m", "vllm"), b'data: {"choices": [{"text": null, "token_ids": [], "finish_reason": "stop"}], "usage": null}',
         AnswerPiece(finish_reason=FinishReason.STOP)),
        (Completions("m", "text"), b'data: {"choices": [{"text": null, "finish_reason": "length"}]}', AnswerPiece(finish_reason=FinishReason.LENGTH)),
        (SglangGenerate(), b'data: {"output_ids": [4], "meta_info": {"completion_tokens": null, "finish_reason": null}}', AnswerPiece(token_ids=(4,))),
        (SglangGenerate(), b'data: {"text": "", "meta_info": {"finish_reason": {"type": "stop"}}}', AnswerPiece(finish_reason=FinishReason.STOP)),
    ],
)  # fmt: skip
def test_counts_texts_and_ids_may_lack_at_the_end_of_an_answer(api, line, piece):
    assert api.answer(request_of()).read(line) == piece


@pytest.mark.parametrize("api", [Completions("m", "vllm"), SglangGenerate(), LlamaCpp()])
@pytest.mark.parametrize(
    "error", [b'"out of memory"', b'{"message": "out of memory", "type": null, "code": null}', b'{"message": null, "type": "out of memory"}']
)  # fmt: skip
def test_the_reason_of_a_failure_is_given_however_it_is_written(api, error):
    with pytest.raises(StepFailed, match="ended the answer: out of memory"):
        api.answer(request_of()).read(b'data: {"error": %s, "choices": null}' % error)


def test_sglangs_abort_needs_no_tokens():
    line = b'data: {"text": "", "meta_info": {"finish_reason": {"type": "abort", "message": "out of memory", "status_code": 500}}}'
    with pytest.raises(StepFailed, match="ended the answer: out of memory"):
        SglangGenerate().answer(request_of()).read(line)


def test_comments_and_the_end_mark_add_nothing():
    answer = Completions("m", "vllm").answer(request_of())
    assert answer.read(b": keep-alive") is None
    assert answer.read(b"event: message") is None
    assert answer.read(b"data: [DONE]") == AnswerPiece(is_last=True)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b'{"error": {"message": "a"}}', "a"), (b'{"error": "b"}', "b"), (b'{"message": "c"}', "c"),
        (b'{"detail": "d"}', "d"), (b"plain\n text", "plain text"), (b"", "no text"), (b"\xff", "\ufffd"),
        (b"x" * 9999, "x" * 500 + "..."), (b"\x1b[31mred\x00", "\ufffd[31mred\ufffd"), (b'{"detail": [1]}', '{"detail": [1]}'),
    ],
)  # fmt: skip
def test_the_text_of_errors(content, text):
    assert error_text(content) == text


HUGE = b"9" * 30


@pytest.mark.parametrize(
    ("api", "line"),
    [
        (Completions("m", "vllm"), b'data: {"choices": [{"token_ids": [%s]}]}' % HUGE),
        (SglangGenerate(), b'data: {"output_ids": [%s], "meta_info": {}}' % HUGE),
        (SglangGenerate(), b'data: {"output_ids": [4], "meta_info": {"output_token_logprobs": [[-1.0, %s, null]]}}' % HUGE),
        (SglangGenerate(), b'data: {"output_ids": [4], "meta_info": {"output_top_logprobs": [[[-1.0, -1, null]]]}}'),
        (LlamaCpp(), b'data: {"tokens": [%s], "stop": false}' % HUGE),
        (LlamaCpp(), b'data: {"tokens": [4], "stop": false, "completion_probabilities": [{"id": %s, "logprob": -1}]}' % HUGE),
        (LlamaCpp(), b'data: {"stop": false, "completion_probabilities": [{"id": 4, "logprob": -1, "top_logprobs": [{"id": -1, "logprob": -1}]}]}'),
        (Ollama("m"), b'{"response": "x", "done": false, "y": ' + b"[" * 100_000),
    ],
)  # fmt: skip
def test_numbers_that_are_no_token_ids_and_deep_nesting_are_no_answer(api, line):
    with pytest.raises(StepFailed, match="no part of an answer"):
        api.answer(request_of(logprobs=1)).read(line)
