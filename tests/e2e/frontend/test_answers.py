"""A frontend's answers over real sockets: streamed or whole, to the openai client and by hand."""

from collections.abc import AsyncIterator

import pytest
from frontend_site import HI, IDS, TOKENIZER, Answer, chat, http, serving

from penstock.core.types.requests import Delta, FinishReason, Request, TokenLogprob
from penstock.core.wire import pack_tokens


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


async def test_http_1_0_gets_its_stream_without_chunks() -> None:
    async with serving() as site:
        reader, writer = await site.connect()
        body = chat(stream=True)
        writer.write(http("POST", "/v1/chat/completions", body).replace(b"HTTP/1.1", b"HTTP/1.0"))
        answer = Answer(await reader.read())
        writer.close()
        assert "transfer-encoding" not in answer.headers
        assert answer.body.endswith(b"data: [DONE]\n\n")
