"""Answers through clients and raw HTTP: headers that matter, echoed prompts, log-probabilities, and answers of no tokens."""

import json
import struct
from collections.abc import AsyncIterator

import msgspec
import openai
import pytest
from frontend_site import HI, IDS, TEXT, TOKENIZER, Answer, chat, http, serving

from penstock.core.types.requests import Delta, FinishReason, PromptLogprobs, Request, TokenLogprob
from penstock.core.wire import pack_tokens, token_list


async def test_a_session_is_taken_from_its_header() -> None:
    async with serving(session_header="X-Talk") as site:
        path = "/v1/chat/completions"
        for headers in (["X-Talk: t-1"], ["X-Session-Id: other"], ["X-Talk: "]):
            assert (await site.ask("POST", path, chat(), *headers)).status == 200
        assert [request.session for request in site.dispatcher.opened] == ["t-1", None, None]
        refused = await site.ask("POST", path, chat(), "X-Talk: " + "t" * 257)
        assert refused.status == 400
        assert refused.error["message"] == "X-Talk: must have at most 256 characters, got 257"
        reader, writer = await site.connect()
        writer.write(http("POST", path, chat(), "X-Talk: ?", "Connection: close").replace(b"?", b"\xff"))
        said = Answer(await reader.read()).error
        writer.close()
        assert said["message"] == "X-Talk: must be printable text in UTF-8, got '\\udcff'"


async def test_targets_are_taken_from_their_headers() -> None:
    async with serving() as site:
        path, ttft, itl = "/v1/chat/completions", "X-Penstock-SLO-TTFT-Ms", "X-Penstock-SLO-ITL-Ms"
        for headers in ([f"{ttft}: 300", f"{itl}: 20.5"], [f"{itl}: 0.1"], []):
            assert (await site.ask("POST", path, chat(), *headers)).status == 200
        opened = [(request.slo_ttft_s, request.slo_itl_s) for request in site.dispatcher.opened]
        assert opened == [(0.3, 0.0205), (None, 0.0001), (None, None)]
        for header, value, text in (
            (ttft, "0.5", "must be 1 to 3,600,000 milliseconds, got 0.5"),
            (ttft, "nan", "must be 1 to 3,600,000 milliseconds, got nan"),
            (itl, "60001", "must be 0.1 to 60,000 milliseconds, got 60001"),
            (itl, "-1", "must be 0.1 to 60,000 milliseconds, got -1"),
            (itl, "soon", "must be a number of milliseconds, got 'soon'"),
            (itl, "", "must be a number of milliseconds, got ''"),
        ):
            refused = await site.ask("POST", path, chat(), f"{header}: {value}")
            assert (refused.status, refused.error["message"]) == (400, f"{header}: {text}")


async def test_tenant_and_priority_are_taken_from_their_headers_where_clients_are_trusted() -> None:
    names = {"tenant_header": "X-Team", "priority_header": "X-Urgency"}
    async with serving(trust_headers=True, **names) as site:
        path = "/v1/chat/completions"
        for headers in (["X-Team: a", "X-Urgency: high"], ["X-Urgency: LOW", "X-Tenant-Id: b"], []):
            assert (await site.ask("POST", path, chat(), *headers)).status == 200
        opened = [(request.tenant, request.priority) for request in site.dispatcher.opened]
        assert opened == [("a", 1), ("", -1), ("", 0)]
        for header, message in (
            ("X-Urgency: 9", "X-Urgency: must be one of high, normal, low, got '9'"),
            ("X-Team: " + "t" * 257, "X-Team: must have at most 256 characters, got 257"),
        ):
            refused = await site.ask("POST", path, chat(), header)
            assert refused.status == 400
            assert refused.error["message"] == message
    async with serving(**names) as site:
        for priority in ("high", "normal", "low"):
            body = chat(agent_hints={"priority": 900})
            for asked in (chat(), body):
                headers = ["X-Team: " + "t" * 257, f"X-Urgency: {priority}"]
                assert (await site.ask("POST", path, asked, *headers)).status == 200
        assert (await site.ask("POST", path, body)).status == 200
        opened = [(request.tenant, request.priority) for request in site.dispatcher.opened]
        assert opened == [("", 0)] * 4 + [("", -1)] * 2 + [("", 0)], "nobody gets ahead by asking for it"


@pytest.mark.parametrize("shown", [None, 1])
async def test_the_most_likely_of_many_answers_are_given(shown: int | None) -> None:
    async def varied(request: Request) -> AsyncIterator[Delta]:
        """Say one to four tokens, the odd choices' more likely ones."""
        values = [-0.5 if request.choice % 2 else -1.0 - request.choice] * (request.choice % 4 + 1)
        yield Delta(
            request_id=request.request_id,
            token_ids=pack_tokens(IDS[: len(values)]),
            finish_reason=FinishReason.LENGTH,
            logprobs=tuple(TokenLogprob(IDS[place], value) for place, value in enumerate(values)),
        )

    async with serving(varied) as site:
        whole = await site.client.completions.create(
            model="tiny", prompt=["one", "two"], n=2, best_of=4, max_tokens=9, logprobs=shown
        )
        made = [TOKENIZER.decode(IDS[: choice % 4 + 1]) for choice in range(8)]
        assert [(choice.index, choice.text) for choice in whole.choices] == [
            (place, made[choice]) for place, choice in enumerate((1, 3, 5, 7))
        ]
        assert whole.usage.completion_tokens == 2 * (1 + 2 + 3 + 4)
        assert [choice.logprobs is not None for choice in whole.choices] == [shown is not None] * 4
        assert [request.sampling.logprobs for request in site.dispatcher.opened] == [shown or 0] * 8


async def test_a_request_reaches_the_dispatcher_as_it_was_meant() -> None:
    async with serving() as site:
        await site.client.chat.completions.create(
            model="tiny",
            messages=HI,
            temperature=0.5,
            top_p=0.9,
            seed=7,
            max_tokens=9,
            presence_penalty=0.1,
            extra_body={"top_k": 4, "min_p": 0.1, "ignore_eos": True, "min_tokens": 2, "stop_token_ids": [9]},
        )
        (request,) = site.dispatcher.opened
        sampling = request.sampling
        assert (sampling.temperature, sampling.top_p, sampling.seed, sampling.max_tokens) == (0.5, 0.9, 7, 9)
        assert (sampling.top_k, sampling.min_p, sampling.ignore_eos, sampling.min_tokens) == (4, 0.1, True, 2)
        assert (sampling.presence_penalty, sampling.stop_token_ids) == (0.1, (9,))
        assert 0 < (request.deadline_s or 0) <= 600


@pytest.mark.parametrize("headers", [(), ("Connection: keep-alive",)])
async def test_http_1_0_gets_its_stream_without_chunks_and_its_end_by_the_connections(
    headers: tuple[str, ...],
) -> None:
    async with serving(keepalive_timeout_s=3600) as site:
        reader, writer = await site.connect()
        asked = http("POST", "/v1/chat/completions", chat(stream=True), *headers)
        writer.write(asked.replace(b"HTTP/1.1", b"HTTP/1.0"))
        answer = Answer(await reader.read())
        writer.close()
        assert "transfer-encoding" not in answer.headers
        assert answer.body.endswith(b"data: [DONE]\n\n")


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
