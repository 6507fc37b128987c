"""From API requests to engine requests."""

import asyncio
import json
import random
import threading
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from structlog.testing import capture_logs

from penstock.core.errors import RequestError
from penstock.core.hashing import block_hashes
from penstock.core.types.instances import request_salt
from penstock.core.types.requests import KvRetention
from penstock.core.wire import token_list, unpack_hashes
from penstock.engine.scheduling.sequences import checked_sampling
from penstock.frontend.apis.bodies import (
    ChatRequest,
    CompletionRequest,
    ContentPart,
    ContinuationBody,
    Message,
    RetentionBody,
)
from penstock.frontend.errors import ContextLengthError
from penstock.frontend.frontend import PendingAnswer
from penstock.frontend.prepare import PreparedRequest, Preprocessor, RequestMetadata
from penstock.frontend.text.models import ServedModel
from tests.support.tokenizer import CHAT_TEMPLATE, tiny_card, tiny_model_files

KEY = bytes(range(16))
HI = [Message(role="user", content="the quick brown fox jumps over the lazy dog and sleeps")]


def model(**card: Any) -> ServedModel:
    return ServedModel(tiny_card(**card), tiny_model_files())


async def prepare(
    preprocessor: Preprocessor,
    request: ChatRequest | CompletionRequest,
    served: ServedModel,
    metadata: RequestMetadata,
) -> PreparedRequest:
    prompts = await preprocessor.encode(request, served, metadata.size_bytes)
    return preprocessor.prepared(request, served, metadata, prompts)


def prepared(request: ChatRequest | CompletionRequest, served: ServedModel | None) -> PreparedRequest:
    async def main() -> PreparedRequest:
        preprocessor = Preprocessor(hash_key=KEY, rng=random.Random(0))
        deadline = asyncio.get_running_loop().time() + 60
        return await prepare(preprocessor, request, served or model(), RequestMetadata("r-1", 100, deadline))

    return asyncio.run(main())


def chat(served: ServedModel | None = None, **fields: Any) -> PreparedRequest:
    return prepared(ChatRequest(model="tiny", **{"messages": HI, **fields}), served)


def complete(served: ServedModel | None = None, **fields: Any) -> PreparedRequest:
    return prepared(CompletionRequest(model="tiny", **{"prompt": "the quick", **fields}), served)


def test_a_chat_is_rendered_tokenized_and_hashed() -> None:
    served = model()
    work = chat(served)
    (request,) = work.requests
    token_ids = token_list(request.token_ids)
    text = served.tokenizer.decode(token_ids, skip_special_tokens=False)
    assert text == f"<|user|>{HI[0].content}<|end|><|assistant|>"
    assert work.prompt_tokens == len(token_ids)
    expected = block_hashes(token_ids, 16, b"tiny", key=KEY)
    assert np.array_equal(unpack_hashes(request.block_hashes).reshape(-1, 2), expected)
    assert request.salt == b"tiny"
    assert request.deadline_s == pytest.approx(60, abs=5)


def test_choices_share_tokens_hashes_and_seed() -> None:
    work = chat(n=3)
    assert [request.choice for request in work.requests] == [0, 1, 2]
    assert [request.request_id for request in work.requests] == ["r-1-0", "r-1-1", "r-1-2"]
    assert len({request.block_hashes for request in work.requests}) == 1
    assert len({request.sampling.seed for request in work.requests}) == 1
    assert work.choices_per_prompt == 3


def test_a_seed_is_kept_or_drawn() -> None:
    assert chat().requests[0].sampling.seed == random.Random(0).getrandbits(63)
    assert [complete(**each).requests[0].sampling.seed_drawn for each in ({"seed": 7}, {})] == [False, True]
    assert chat(seed=42).requests[0].sampling.seed == 42
    assert 0 <= (chat(seed=-1).requests[0].sampling.seed or 0) < 1 << 63


def test_cache_salts_change_every_hash() -> None:
    plain, salted = chat().requests[0], chat(cache_salt="tenant").requests[0]
    assert salted.salt == request_salt(b"tiny", "tenant") == b"tiny|cache_salt=tenant"
    assert plain.token_ids == salted.token_ids
    assert not set(unpack_hashes(plain.block_hashes)) & set(unpack_hashes(salted.block_hashes))


def test_max_tokens_is_the_rest_of_the_context_or_what_was_asked() -> None:
    work = chat()
    assert work.requests[0].sampling.max_tokens == 512 - work.prompt_tokens
    assert chat(max_tokens=7).requests[0].sampling.max_tokens == 7
    assert chat(max_completion_tokens=8).requests[0].sampling.max_tokens == 8
    assert complete().requests[0].sampling.max_tokens == 16


def test_a_prompt_longer_than_the_context_names_both_numbers() -> None:
    served = model(context_length=12)
    size = chat().prompt_tokens
    assert size >= 12
    with pytest.raises(
        ContextLengthError, match=f"messages: {size} tokens do not fit .* context of 12"
    ) as caught:
        chat(served)
    assert caught.value.param == "messages"
    assert caught.value.http_status == 400


def test_an_answer_longer_than_the_rest_of_the_context_is_refused() -> None:
    size = chat().prompt_tokens
    with pytest.raises(
        ContextLengthError, match=f"{size} prompt tokens and 512 .* 512; at most {512 - size}"
    ) as caught:
        chat(max_completion_tokens=512)
    assert caught.value.param == "max_completion_tokens"
    assert chat(max_tokens=512 - size).requests[0].sampling.max_tokens == 512 - size


def test_a_models_own_defaults_apply_where_a_request_says_nothing() -> None:
    defaults = (("temperature", 0.6), ("top_k", 20.0), ("top_p", 0.9))
    card = msgspec.structs.replace(tiny_card(), default_sampling=defaults)
    with_defaults = ServedModel(card, tiny_model_files())
    sampling = chat(with_defaults).requests[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.6, 20, 0.9)
    sampling = chat(with_defaults, temperature=0.0, top_k=-1).requests[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.0, None, 0.9)


def test_a_top_p_of_0_keeps_the_likeliest_token_alone() -> None:
    card = msgspec.structs.replace(tiny_card(), default_sampling=(("top_p", 0.0),))
    for said in (chat(ServedModel(card, tiny_model_files())), chat(top_p=0.0)):
        sampling = said.requests[0].sampling
        assert 0 < sampling.top_p < 1 / 500_000
        checked_sampling(sampling, vocab_size=500_000, context_length=512)


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        *(({"prompt": prompt}, "prompt", "token ids must be >= 0 and < ") for prompt in ([-1], [0, 5000], [1 << 40])),
        *(({"prompt": prompt}, "prompt", "is empty") for prompt in ("", [[]], ["x", ""])),
        ({"stop_token_ids": [5000]}, "stop_token_ids", "stop_token_ids"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "min_tokens"),
        ({"logit_bias": {"100000": 1}}, "logit_bias", "must be >= 0"),
        ({"allowed_token_ids": [100_000]}, "allowed_token_ids", "must be >= 0"),
    ],
)  # fmt: skip
def test_what_does_not_fit_the_model_is_refused(fields: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(RequestError, match=says) as caught:
        complete(**fields)
    assert caught.value.param == param


def test_a_model_without_template_only_completes() -> None:
    served = ServedModel(tiny_card(), {"tokenizer.json": tiny_model_files()["tokenizer.json"]})
    with pytest.raises(RequestError, match="has no chat template; use /v1/completions"):
        chat(served)
    assert complete(served).prompt_tokens


def test_arguments_of_past_tool_calls_reach_the_template_as_objects() -> None:
    template = b"{% for m in messages %}{{ m.tool_calls[0].function.arguments.city }}{% endfor %}"
    files = {**tiny_model_files(), "chat_template.jinja": template}
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "f", "arguments": json.dumps({"city": "dog"})},
    }
    served = ServedModel(tiny_card(files=files), files)
    work = chat(served, messages=[Message(role="assistant", tool_calls=[call])])
    assert served.tokenizer.decode(token_list(work.requests[0].token_ids)) == "dog"


def test_hints_on_kv_reach_the_engines_request() -> None:
    template = b"{% for m in messages %}{{ m.content }}{% endfor %}"
    files = {**tiny_model_files(), "chat_template.jinja": template}
    served = ServedModel(tiny_card(files=files), files)
    user, result = Message(role="user", content="dog"), Message(role="tool", content="dog", tool_call_id="1")
    request = chat(served, messages=[user, result], kv_retention=RetentionBody(ttl_s=9)).requests[0]
    assert (request.retention, request.follows_tool) == (KvRetention(priority=1, ttl_s=9), True)
    request = chat(served, messages=[user]).requests[0]
    assert (request.retention, request.follows_tool) == (None, False)


def text_of(prepared: PreparedRequest) -> str:
    """Give the text of a request's prompt."""
    model = prepared.model
    return model.tokenizer.decode(token_list(prepared.requests[0].token_ids), skip_special_tokens=False)


TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %};{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{{ reasoning_effort }}{{ enable_thinking }}{% endif %}"
)


def templated(template: str = TEMPLATE) -> ServedModel:
    config = json.dumps({"chat_template": template}).encode()
    return ServedModel(tiny_card(), {**tiny_model_files(), "tokenizer_config.json": config})


def test_an_assistants_message_can_go_on() -> None:
    said = [Message(role="user", content="hi"), Message(role="assistant", content="the quick ")]
    prepared = chat(templated(), messages=said, continue_final_message=True)
    assert text_of(prepared) == "[user]hi;[assistant]the quick "
    assert not prepared.begins_text


def test_a_template_that_changes_the_last_message_is_refused() -> None:
    said = [
        Message(role="user", content="hi"),
        Message(role="assistant", content=[ContentPart(type="text", text="a")]),
    ]
    assert text_of(chat(templated(), messages=said, continue_final_message=True)).endswith("[assistant]a")
    config = json.dumps(
        {"chat_template": "{% for m in messages %}{{ m.content | upper }}{% endfor %}"}
    ).encode()
    upper = ServedModel(tiny_card(), {**tiny_model_files(), "tokenizer_config.json": config})
    with pytest.raises(RequestError) as caught:
        chat(upper, messages=[Message(role="assistant", content="abc")], continue_final_message=True)
    assert caught.value.param == "continue_final_message"


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        *((nothing, "{}") for nothing in (None, "", " ", "null", "[]", {})),
        ({"a": 1}, '{"a": 1}'),
        ('{"a": 1}', '{"a": 1}'),
        ('{"a": "Par', '{"arguments": "{\\"a\\": \\"Par"}'),
        ("[1]", '{"arguments": [1]}'),
    ],
)
def test_arguments_in_the_history_are_always_an_object(arguments: Any, shown: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    said = [Message(role="assistant", tool_calls=[call])]
    text = text_of(chat(templated(), messages=said, add_generation_prompt=False))
    assert text == f"[assistant]f{shown};"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_history_reaches_the_template_as_it_was(name: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": ""}}
    said = [
        Message(role="assistant", content=None, tool_calls=[call], reasoning_content="so"),
        Message(role="assistant", content=[ContentPart(type="refusal", refusal="no")]),
        Message(role="assistant", refusal="never"),
    ]
    served = templated(TEMPLATE.replace("reasoning_content", name))
    text = text_of(chat(served, messages=said, add_generation_prompt=False))
    assert text == "[assistant](so)f{};[assistant]no;[assistant]never;"


@pytest.mark.parametrize(
    ("effort", "shown"), [("high", "highTrue"), ("none", "noneFalse"), ("minimal", "minimalFalse")]
)
def test_the_effort_of_reasoning_is_the_templates(effort: str, shown: str) -> None:
    assert text_of(chat(templated(), reasoning_effort=effort)).endswith(f"[assistant]{shown}")


def test_what_the_template_does_not_read_is_named() -> None:
    with capture_logs() as logs:
        for _ in range(2):
            chat(templated(), chat_template_kwargs={"unread": 1, "enable_thinking": True})
    assert [each["field"] for each in logs] == ["chat_template_kwargs.unread"]


BUDGET = TEMPLATE.replace("enable_thinking", "thinking_budget")


@pytest.mark.parametrize(
    ("template", "fields", "shown"),
    [
        (TEMPLATE, {"enable_thinking": False}, "False"),
        (TEMPLATE, {"enable_thinking": True}, "True"),
        (TEMPLATE, {"thinking_token_budget": 0}, "False"),
        (TEMPLATE, {"thinking_token_budget": 0, "reasoning_effort": "none"}, "noneFalse"),
        (BUDGET, {"thinking_token_budget": 0}, "0"),
        (BUDGET, {"thinking_token_budget": 5}, "5"),
        (TEMPLATE, {"thinking_token_budget": 5}, "thinking_token_budget: the chat template .* cannot bound reasoning"),
        (TEMPLATE, {"thinking_token_budget": 0, "enable_thinking": True}, "thinking_token_budget: got 0, but another field sets"),
        (TEMPLATE, {"enable_thinking": False, "chat_template_kwargs": {"enable_thinking": True}}, "enable_thinking: got False"),
        *((BUDGET, {"enable_thinking": value}, "enable_thinking: .* cannot turn") for value in (False, True)),
        *((CHAT_TEMPLATE, {"thinking_token_budget": value}, "thinking_token_budget: .* cannot") for value in (0, 5)),
    ],
)  # fmt: skip
def test_reasoning_is_turned_off_and_bounded_where_the_template_can(
    template: str, fields: dict[str, Any], shown: str
) -> None:
    served = templated(template)
    if ":" in shown:
        with pytest.raises(RequestError, match=shown) as caught:
            chat(served, **fields)
        assert caught.value.param == shown.partition(":")[0]
    else:
        assert text_of(chat(served, **fields)).endswith(f"[assistant]{shown}")


def test_lower_priorities_of_a_body_come_first_as_in_vllm() -> None:
    assert chat(priority=3).requests[0].priority == -3
    assert chat(priority=0).requests[0].priority == 0


def test_limits_of_tokens_reach_the_engine() -> None:
    served = model()
    sampling = (
        chat(served, logit_bias={"7": -3.5, "9": 100}, allowed_token_ids=[7, 9], bad_words=["fox", " dog"])
        .requests[0]
        .sampling
    )
    assert sampling.logit_bias == ((7, -3.5), (9, 100))
    assert sampling.allowed_token_ids == (7, 9)
    words = {served.tokenizer.decode(list(word)) for word in sampling.bad_words}
    assert words == {"fox", " fox", "dog", " dog"}
    prompts = CompletionRequest(
        model="tiny", prompt=["one", "two"], bad_words=["fox"], allowed_token_ids=[7, 9]
    )
    first, second = (request.sampling for request in prepared(prompts, served).requests)
    assert first.bad_words is second.bad_words, "they are tokenized once, not for each prompt"
    assert first.allowed_token_ids is second.allowed_token_ids


@pytest.mark.parametrize(
    ("stream", "n", "most"),
    [pytest.param(False, 15, 16 << 20, marks=pytest.mark.nightly), (True, 4, 4 << 20)],
)
def test_an_answer_repeats_a_bounded_text_of_prompts(stream: bool, n: int, most: int) -> None:
    served, prompt = model(context_length=1 << 20), ["the quick fox " * 40_000] * 2
    assert complete(served, prompt=prompt, n=n // 2, echo=True, stream=stream).echoed_bytes <= most
    size = 1_120_004 * n
    assert size > most
    refused = f"echo: 1120004 bytes of prompts as JSON, for {n} choices, are {size} bytes; at most {most} fit"
    with pytest.raises(RequestError, match=refused) as error:
        complete(served, prompt=prompt, n=n, echo=True, stream=stream)
    assert error.value.param == "echo"


@pytest.mark.parametrize(("echo", "in_thread"), [(True, True), (False, False)])
def test_an_answer_with_a_long_echo_is_encoded_in_a_thread(echo: bool, in_thread: bool) -> None:
    prepared = complete(model(context_length=1 << 20), prompt="the quick fox " * 10_000, n=2, echo=echo)
    pending = PendingAnswer(SimpleNamespace(usage=lambda: None), prepared, None, None, stream=False)
    threads = []

    def body(_usage: object) -> bytes:
        threads.append(threading.get_ident())
        return b"{}"

    assert asyncio.run(pending.body(SimpleNamespace(body=body))) == b"{}"
    assert (threads != [threading.get_ident()]) is in_thread


def test_an_answer_goes_on_from_its_place() -> None:
    ids = [3, 4, 5, 6]
    said = ContinuationBody(num_emitted=3, choice=2)
    (request,) = complete(prompt=ids, max_tokens=7, min_tokens=2, seed=9, continuation=said).requests
    assert (request.num_emitted, request.choice, request.sampling.seed) == (3, 2, 9)
    assert (request.sampling.max_tokens, request.sampling.min_tokens) == (10, 5), (
        "they count what was emitted"
    )
    (request,) = complete(prompt=ids, max_tokens=7).requests
    assert (request.num_emitted, request.choice, request.sampling.max_tokens) == (0, 0, 7)


def test_prompt_ids_are_given_within_a_bound_and_not_to_who_goes_on() -> None:
    served, ids = model(context_length=1 << 20), [5] * 200_000
    with pytest.raises(RequestError, match="return_token_ids: 1600000 bytes"):
        complete(served, prompt=ids, n=12, return_token_ids=True)
    assert complete(served, prompt=ids, n=8, return_token_ids=True).prompts[0].gives_ids
    going_on = complete(
        served, prompt=ids, return_token_ids=True, continuation=ContinuationBody(num_emitted=0)
    )
    assert (going_on.prompts, going_on.gives_token_ids) == ((), True)
