"""Echoed prompts, log-probabilities of prompts, and answers of no tokens, through the openai client."""

import json
import struct
from collections.abc import AsyncIterator

import msgspec
import openai
import pytest
from frontend_site import HI, IDS, TEXT, TOKENIZER, chat, serving

from penstock.core.types.requests import Delta, FinishReason, PromptLogprobs, Request, TokenLogprob
from penstock.core.wire import pack_tokens, token_list

PROMPT = "jumps the brown 你好 dog"


async def answer(request: Request) -> AsyncIterator[Delta]:
    """Say TEXT, after two parts of the prompt's log-probabilities: -n for the token at place n, and one half for others."""
    sampling, request_id = request.sampling, request.request_id
    prompt = token_list(request.token_ids)
    if sampling.prompt_logprobs is not None:
        middle = len(prompt) // 2 + 1
        for start, end in ((1, middle), (middle, len(prompt))):
            if start == end:
                continue
            rows = [[prompt[place], *range(sampling.prompt_logprobs)] for place in range(start, end)]
            values = [[-place, *[-0.5] * sampling.prompt_logprobs] for place in range(start, end)]
            yield Delta(
                request_id=request_id,
                prompt_logprobs=(
                    PromptLogprobs(
                        start=start,
                        token_ids=pack_tokens([token for row in rows for token in row]),
                        logprobs=b"".join(struct.pack("<f", value) for row in values for value in row),
                        ranks=pack_tokens(range(start, end)),
                    ),
                ),
            )
    output = IDS[: sampling.max_tokens]
    for index, token_id in enumerate(output):
        yield Delta(
            request_id=request_id,
            token_ids=pack_tokens([token_id]),
            cached_tokens=0 if index == 0 else None,
            finish_reason=FinishReason.LENGTH if index == len(output) - 1 else None,
            logprobs=()
            if sampling.logprobs is None
            else (TokenLogprob(token_id, -0.25, ((token_id, -0.25),)[: sampling.logprobs]),),
        )


def ids_of(prompt: str) -> list[int]:
    return TOKENIZER.encode(prompt).ids


async def test_prompts_of_every_form_are_echoed() -> None:
    async with serving(answer) as site:
        create, ids = site.client.completions.create, ids_of(PROMPT)
        for prompt in (PROMPT, [PROMPT, "dog"], ids, [ids, ids_of("dog")]):
            for max_tokens, text in ((len(IDS), TEXT), (0, "")):
                whole = await create(model="tiny", prompt=prompt, echo=True, max_tokens=max_tokens)
                texts = [PROMPT + text, "dog" + text][: len(whole.choices)]
                assert [choice.text for choice in whole.choices] == texts
                assert {choice.finish_reason for choice in whole.choices} == {"length"}
                assert whole.usage.completion_tokens == max_tokens * len(texts)
                assert whole.choices[0].logprobs is None
                pieces = [""] * len(texts)
                async for chunk in await create(
                    model="tiny", prompt=prompt, echo=True, max_tokens=max_tokens, stream=True
                ):
                    for choice in chunk.choices:
                        pieces[choice.index] += choice.text
                assert pieces == texts
        assert all(request.sampling.prompt_logprobs is None for request in site.dispatcher.opened)
        assert {request.sampling.max_tokens for request in site.dispatcher.opened} == {1, len(IDS)}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("alternatives", [0, 2])
async def test_echoed_log_probabilities_are_those_of_lm_evals_reading(
    alternatives: int, *, stream: bool
) -> None:
    async with serving(answer) as site:
        ids = ids_of(PROMPT)
        asked = {"prompt": [ids], "echo": True, "logprobs": alternatives, "max_tokens": 1}
        if not stream:
            whole = await site.client.completions.create(model="tiny", **asked)
            logprobs = whole.choices[0].logprobs
            text = whole.choices[0].text
        else:
            chunks = [
                chunk.choices[0]
                async for chunk in await site.client.completions.create(model="tiny", stream=True, **asked)
            ]
            text = "".join(choice.text for choice in chunks)
            (logprobs,) = (choice.logprobs for choice in chunks if choice.logprobs is not None)
        assert text == PROMPT + TOKENIZER.decode(IDS[:1])
        assert logprobs.token_logprobs == [None, *(-float(place) for place in range(1, len(ids))), -0.25]
        assert logprobs.text_offset == sorted(logprobs.text_offset)
        assert logprobs.text_offset[-1] == len(PROMPT)
        assert len(logprobs.tokens) == len(ids) + 1
        if alternatives:
            assert logprobs.top_logprobs[0] is None
            assert all(set(top.values()) == {-0.5} for top in logprobs.top_logprobs[1:-1])
        else:
            assert logprobs.top_logprobs is None
        assert [request.sampling.prompt_logprobs for request in site.dispatcher.opened] == [alternatives]


async def test_a_stop_token_has_its_entry_beside_an_echoed_prompt() -> None:
    async def ends(request: Request) -> AsyncIterator[Delta]:
        async for delta in answer(request):
            reason = FinishReason.STOP if delta.token_ids else None
            yield msgspec.structs.replace(delta, finish_reason=reason)

    async with serving(ends) as site:
        ids = ids_of(PROMPT)
        for echo, count in ((True, len(ids) + 1), (False, 0)):
            whole = await site.client.completions.create(
                model="tiny", prompt=ids, echo=echo, logprobs=1, max_tokens=1
            )
            (choice,) = whole.choices
            assert choice.finish_reason == "stop"
            assert choice.text == (PROMPT if echo else "")
            assert len(choice.logprobs.token_logprobs) == count
            assert whole.usage.completion_tokens == 1


async def test_an_answer_of_no_tokens_says_no_token() -> None:
    async with serving(answer) as site:
        path = "/v1/completions"
        for fields in ({}, {"echo": True, "logprobs": 1}, {"prompt_logprobs": 1}):
            found = (await site.post(path, prompt="dog fox", max_tokens=0, **fields)).json
            (choice,) = found["choices"]
            assert choice["text"] == ("dog fox" if "echo" in fields else "")
            assert choice["finish_reason"] == "length"
            assert found["usage"]["completion_tokens"] == 0
            if "logprobs" in fields:
                values = [None, *(-float(place) for place in range(1, len(ids_of("dog fox"))))]
                assert choice["logprobs"]["token_logprobs"] == values
        refused = await site.ask("POST", "/v1/chat/completions", chat(max_tokens=0))
        assert refused.status == 400
        assert "max_tokens: must be >= 1, got 0" in refused.error["message"]


async def test_prompt_logprobs_are_given_as_vllm_gives_them() -> None:
    async with serving(answer) as site:
        extra = {"extra_body": {"prompt_logprobs": 2}}
        completion = await site.client.completions.create(
            model="tiny", prompt=[PROMPT, "dog fox"], max_tokens=2, **extra
        )
        for choice, prompt in zip(completion.choices, (PROMPT, "dog fox"), strict=True):
            first, *rest = choice.prompt_logprobs
            assert first is None
            ids = ids_of(prompt)
            assert len(rest) == len(ids) - 1
            for place, (token_id, listed) in enumerate(zip(ids[1:], rest, strict=True), 1):
                assert listed[str(token_id)] == {
                    "logprob": -float(place),
                    "rank": place,
                    "decoded_token": TOKENIZER.decode([token_id]),
                } or token_id in (0, 1)
                assert [listed[str(other)]["logprob"] for other in (0, 1)] == [-0.5, -0.5]
        answered = await site.client.chat.completions.create(
            model="tiny", messages=HI, max_tokens=2, n=2, **extra
        )
        assert answered.prompt_logprobs[0] is None
        assert len(answered.prompt_logprobs) == answered.usage.prompt_tokens
        plain = await site.client.chat.completions.create(model="tiny", messages=HI, max_tokens=2)
        assert "prompt_logprobs" not in plain.model_extra


async def test_too_many_values_are_refused_and_many_do_not_stop_the_loop() -> None:
    async with serving(answer, choices_max=64) as site:
        create, ids = site.client.completions.create, [5] * 500
        for asked in (
            {"stream": True, "logprobs": 20, "echo": True, "n": 2},
            {"logprobs": 20, "echo": True, "prompt": [ids] * 6, "n": 10},
            {"extra_body": {"prompt_logprobs": 20}, "prompt": [ids] * 6, "n": 10},
        ):
            with pytest.raises(openai.BadRequestError, match="log-probabilities; at most"):
                await create(model="tiny", **({"prompt": ids, "max_tokens": 1} | asked))
        whole = await create(model="tiny", prompt=ids, max_tokens=1, echo=True, logprobs=20)
        assert len(whole.choices[0].logprobs.token_logprobs) == len(ids) + 1


async def test_annotations_stand_before_a_stream_as_dynamo_writes_them() -> None:
    async with serving(answer) as site:
        nvext = {"annotations": ["token_ids", "formatted_prompt", "llm_metrics", "of-tomorrow"]}
        for path, body in (
            ("/v1/chat/completions", chat(stream=True, max_tokens=2, nvext=nvext)),
            (
                "/v1/completions",
                json.dumps({"model": "tiny", "prompt": "dog fox", "stream": True, "nvext": nvext}).encode(),
            ),
        ):
            raw = (await site.ask("POST", path, body)).body.decode()
            events = [event for event in raw.replace("\r\n", "\n").split("\n\n") if "event: " in event]
            found = {
                event.partition("event: ")[2].partition("\n: ")[0]: json.loads(event.partition("\n: ")[2])
                for event in events
            }
            assert all("data:" not in event for event in events)
            assert raw.index("event: token_ids") < raw.index("data: ")
            is_chat = "chat" in path
            assert list(found) == (["formatted_prompt", "token_ids"] if is_chat else ["token_ids"])
            assert found["token_ids"] == token_list(site.dispatcher.opened[-1].token_ids)
            if is_chat:
                assert "hello" in found["formatted_prompt"]
                assert (
                    TOKENIZER.encode(found["formatted_prompt"], add_special_tokens=False).ids
                    == found["token_ids"]
                )
        whole = await site.client.chat.completions.create(
            model="tiny", messages=HI, max_tokens=2, extra_body={"nvext": nvext}
        )
        assert whole.choices[0].message.content
