"""From API requests to engine requests."""

import asyncio
import json
import random
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock.core.errors import RequestError
from penstock.core.hashing import block_hashes
from penstock.core.types.cards import request_salt
from penstock.core.types.requests import KvRetention
from penstock.core.wire import token_list, unpack_hashes
from penstock.frontend.errors import ContextLengthError
from penstock.frontend.frontend import PendingAnswer
from penstock.frontend.openai.agents import RetentionBody
from penstock.frontend.openai.bodies import (
    ChatRequest,
    CompletionRequest,
    ContentPart,
    ContinuationBody,
    Message,
)
from penstock.frontend.requests.preprocess import PreparedRequest, Preprocessor, RequestMetadata
from penstock.frontend.text.models import ServedModel
from tests.support.tokenizer import tiny_card, tiny_model_files

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


def chat(
    served: ServedModel | None = None, *, size_bytes: int = 100, seed: int = 0, **fields: Any
) -> PreparedRequest:
    async def main() -> PreparedRequest:
        preprocessor = Preprocessor(hash_key=KEY, rng=random.Random(seed))
        deadline = asyncio.get_running_loop().time() + 60
        request = ChatRequest(model="tiny", **{"messages": HI, **fields})
        return await prepare(
            preprocessor, request, served or model(), RequestMetadata("chat-1", size_bytes, deadline)
        )

    return asyncio.run(main())


def complete(served: ServedModel | None = None, **fields: Any) -> PreparedRequest:
    async def main() -> PreparedRequest:
        preprocessor = Preprocessor(hash_key=KEY, rng=random.Random(0))
        deadline = asyncio.get_running_loop().time() + 60
        request = CompletionRequest(model="tiny", **{"prompt": "the quick", **fields})
        return await prepare(
            preprocessor, request, served or model(), RequestMetadata("cmpl-1", 100, deadline)
        )

    return asyncio.run(main())


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


def test_parts_of_a_content_are_joined_by_lines() -> None:
    parts = [ContentPart(type="text", text="one"), ContentPart(type="text", text="two")]
    joined = chat(messages=[Message(role="user", content="one\ntwo")])
    assert (
        chat(messages=[Message(role="user", content=parts)]).requests[0].token_ids
        == joined.requests[0].token_ids
    )


def test_a_large_body_gives_the_same_from_its_thread() -> None:
    large, small = chat(size_bytes=1 << 20).requests[0], chat().requests[0]
    assert (large.token_ids, large.block_hashes) == (small.token_ids, small.block_hashes)


def test_choices_share_tokens_hashes_and_seed() -> None:
    work = chat(n=3, seed=5)
    assert [request.choice for request in work.requests] == [0, 1, 2]
    assert [request.request_id for request in work.requests] == ["chat-1-0", "chat-1-1", "chat-1-2"]
    assert len({request.block_hashes for request in work.requests}) == 1
    assert len({request.sampling.seed for request in work.requests}) == 1
    assert work.choices_per_prompt == 3


def test_a_seed_is_kept_or_drawn() -> None:
    assert chat(seed=7).requests[0].sampling.seed == chat(seed=7).requests[0].sampling.seed
    assert chat().requests[0].sampling.seed == random.Random(0).getrandbits(63)
    assert [complete(**each).requests[0].sampling.seed_drawn for each in ({"seed": 7}, {})] == [False, True]

    async def with_seed(seed: int) -> int | None:
        preprocessor = Preprocessor(hash_key=KEY, rng=random.Random(0))
        request = ChatRequest(model="tiny", messages=HI, seed=seed)
        work = await prepare(preprocessor, request, model(), RequestMetadata("x", 1, 1e9))
        return work.requests[0].sampling.seed

    assert asyncio.run(with_seed(42)) == 42
    assert 0 <= (asyncio.run(with_seed(-1)) or 0) < 1 << 63


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
    card = tiny_card()
    with_defaults = ServedModel(
        type(card)(**{**{f: getattr(card, f) for f in card.__struct_fields__},
                      "default_sampling": (("temperature", 0.6), ("top_k", 20.0), ("top_p", 0.9))}),
        tiny_model_files(),
    )  # fmt: skip
    sampling = chat(with_defaults).requests[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.6, 20, 0.9)
    sampling = chat(with_defaults, temperature=0.0, top_k=-1).requests[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.0, None, 0.9)


def test_logprobs_of_both_apis() -> None:
    assert chat().logprobs is None
    assert chat(logprobs=True).logprobs == 0
    assert chat(logprobs=True, top_logprobs=4).requests[0].sampling.logprobs == 4
    assert complete(logprobs=2).requests[0].sampling.logprobs == 2


def test_prompts_of_every_form() -> None:
    ids = token_list(complete().requests[0].token_ids)
    assert token_list(complete(prompt=ids).requests[0].token_ids) == ids
    batch = complete(prompt=[ids, ids[:1]], n=2)
    assert [len(token_list(request.token_ids)) for request in batch.requests] == [len(ids), len(ids), 1, 1]
    assert [request.choice for request in batch.requests] == [0, 1, 2, 3]
    assert batch.prompt_tokens == len(ids) + 1
    assert len(complete(prompt=["a", "b", "c"]).requests) == 3


def test_token_ids_out_of_range_are_refused() -> None:
    for prompt in ([-1], [0, 5000], [1 << 40]):
        with pytest.raises(RequestError, match="prompt: token ids must be >= 0 and < ") as caught:
            complete(prompt=prompt)
        assert caught.value.param == "prompt"
    with pytest.raises(RequestError, match="stop_token_ids"):
        chat(stop_token_ids=[5000])


def test_an_empty_prompt_is_refused() -> None:
    for prompt in ("", [[]], ["x", ""]):
        with pytest.raises(RequestError, match="prompt: is empty"):
            complete(prompt=prompt)


def test_min_tokens_must_fit_max_tokens() -> None:
    with pytest.raises(RequestError, match="min_tokens"):
        chat(min_tokens=9, max_tokens=8)


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


def templated() -> ServedModel:
    config = json.dumps({"chat_template": TEMPLATE}).encode()
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


def test_history_reaches_the_template_as_it_was() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": ""}}
    said = [
        Message(role="assistant", content=None, tool_calls=[call], reasoning_content="so"),
        Message(role="assistant", content=[ContentPart(type="refusal", refusal="no")]),
        Message(role="assistant", refusal="never"),
    ]
    text = text_of(chat(templated(), messages=said, add_generation_prompt=False))
    assert text == "[assistant](so)f{};[assistant]no;[assistant]never;"


@pytest.mark.parametrize(
    ("effort", "shown"), [("high", "highTrue"), ("none", "noneFalse"), ("minimal", "minimalFalse")]
)
def test_the_effort_of_reasoning_is_the_templates(effort: str, shown: str) -> None:
    assert text_of(chat(templated(), reasoning_effort=effort)).endswith(f"[assistant]{shown}")


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
    for name, value in (("logit_bias", {"100000": 1}), ("allowed_token_ids", [100_000])):
        with pytest.raises(RequestError, match=f"{name}: must be >= 0") as caught:
            chat(served, **{name: value})
        assert caught.value.param == name


@pytest.mark.parametrize(("stream", "n", "most"), [(False, 63, 16 << 20), (True, 15, 4 << 20)])
def test_an_answer_repeats_a_bounded_text_of_prompts(stream: bool, n: int, most: int) -> None:
    served, prompt = model(context_length=1 << 20), ["the quick fox " * 10_000] * 2
    assert complete(served, prompt=prompt, n=n // 2, echo=True, stream=stream).echoed_bytes <= most
    complete(served, prompt=prompt, n=n, stream=stream)
    size = 280_004 * n
    assert size > most
    refused = f"echo: 280004 bytes of prompts as JSON, for {n} choices, are {size} bytes; at most {most} fit"
    with pytest.raises(RequestError, match=refused) as error:
        complete(served, prompt=prompt, n=n, echo=True, stream=stream)
    assert error.value.param == "echo"


def test_text_counts_as_long_as_json_makes_it() -> None:
    served, size = model(context_length=1 << 20), 800_000
    complete(served, prompt="x" * size, echo=True, stream=True)
    with pytest.raises(RequestError, match=f"echo: {6 * size + 2} bytes of prompts as JSON"):
        complete(served, prompt="\x01" * size, echo=True, stream=True)


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


def test_an_answer_ends_with_its_stop_string_where_that_is_asked_for() -> None:
    assert complete(model(), prompt="x", include_stop_str_in_output=True).shows_stop
    assert not complete(model(), prompt="x").shows_stop


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
