"""What a frontend refuses, over real sockets: each in the API's own shape, and the next request is served."""

import openai
import pytest
from frontend_site import HI, SPEAK, Answer, chat, http, serving

from penstock.frontend.requests.encoders import LARGE_BYTES
from tests.support.dispatcher import ScriptedDispatcher
from tests.support.tokenizer import tiny_card
from tests.support.tool_talk import SAID, says


async def test_the_openai_client_understands_refusals() -> None:
    async with serving() as site:
        with pytest.raises(openai.NotFoundError) as missing:
            await site.client.chat.completions.create(model="none", messages=HI)
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as bad:
            await site.client.chat.completions.create(model="tiny", messages=HI, max_tokens=-1, stream=True)
        assert bad.value.param == "max_tokens"


@pytest.mark.parametrize("how", ["content-length", "chunked", "gzip"])
async def test_a_body_too_large_is_413(how: str) -> None:
    import gzip

    async with serving(body_bytes_max=2000) as site:
        body = chat(user="x" * 4000)
        if how == "content-length":
            # Refused before the body is sent.
            reader, writer = await site.connect()
            writer.write(http("POST", "/v1/chat/completions", b"", "Content-Length: 4000"))
            answer = Answer(await reader.readuntil(b"}}"))
            writer.close()
        elif how == "chunked":
            chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
            answer = await site.ask("POST", "/v1/chat/completions", chunked, "Transfer-Encoding: chunked")
        else:
            answer = await site.ask(
                "POST", "/v1/chat/completions", gzip.compress(body), "Content-Encoding: gzip"
            )
        assert answer.status == 413
        assert answer.error["code"] == "request_too_large"
        assert "2000 bytes" in answer.error["message"]
        exact = chat(user="").ljust(2000)
        assert (await site.ask("POST", "/v1/chat/completions", exact)).status == 200


async def test_unknown_paths_and_methods_have_the_apis_shape() -> None:
    async with serving() as site:
        answer = await site.ask("GET", "/v2/nothing")
        assert (answer.status, answer.error["code"]) == (404, "path_not_found")
        answer = await site.ask("GET", "/v1/chat/completions")
        assert (answer.status, answer.error["code"]) == (405, "method_not_allowed")
        assert answer.headers["allow"] == "POST"


async def test_what_is_not_http_is_refused_in_the_apis_shape() -> None:
    raws = (
        b"\x16\x03\x01 nonsense\r\n\r\n",
        b"GARBAGE\r\n\r\n",
        b"GET /live HTTP/1.1\r\nHost: test\r\nX-Odd: a\x01b\r\n\r\n",
        b"GET /live HTTP/1.1\r\nHost: test\r\nX-Long: " + b"x" * 9000 + b"\r\n\r\n",
        b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\nHost: test\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: test\r\nContent-Length: -4\r\n\r\n",
    )
    async with serving() as site:
        for raw in raws:
            reader, writer = await site.connect()
            writer.write(raw)
            answer = Answer(await reader.read())
            writer.close()
            assert answer.status == 400
            assert answer.headers["content-type"].startswith("application/json")
            assert len(answer.headers["x-request-id"]) == 24
            message = answer.error["message"]
            assert message.startswith("not a valid HTTP request: ")
            assert "\n" not in message
            assert len(message) < 400
            assert answer.error["type"] == "invalid_request_error"
        assert (await site.ask("GET", "/live")).status == 200
        name = 'penstock_frontend_requests_total{code="400",route="unknown"}'
        assert await site.metric(name) == len(raws)


async def test_an_unknown_encoding_of_the_body_is_named() -> None:
    async with serving() as site:
        for encoding in ("zap", "br", "zstd", "gzip, gzip"):
            answer = await site.ask("POST", "/v1/chat/completions", chat(), f"Content-Encoding: {encoding}")
            assert (answer.status, answer.error["code"]) == (415, "unsupported_encoding")
            assert encoding in answer.error["message"]
            assert answer.error["message"].endswith("; send one of gzip, deflate, identity")


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


@pytest.mark.slow
@pytest.mark.parametrize(
    "size_bytes", [0, pytest.param(LARGE_BYTES, marks=pytest.mark.nightly)], ids=["here", "encoder"]
)
@pytest.mark.within(240)
async def test_nesting_of_any_depth_is_answered_or_refused(size_bytes: int) -> None:
    fields = {
        "required": b'"tools":[{"type":"function","function":{"name":"a","parameters":{"a":%b}}}],"tool_choice":"required"',
        "tools": b'"tools":[{"type":"function","function":{"name":"a","parameters":{"a":%b}}}]',
        "schema": b'"response_format":{"type":"json_schema","json_schema":{"schema":{"a":%b}}}',
        "arguments": b'"chat_template_kwargs":{"a":%b}',
        "calls": b'"messages":[{"role":"assistant","tool_calls":[{"id":"1","type":"function","function":{"name":"a","arguments":"%b"}}]}]',
    }  # fmt: skip
    async with serving(dispatcher=says(SAID, at_once=40)) as site:
        statuses = set()
        for depth in (100, *range(700, 1000, 30)):
            for name, field in fields.items():
                messages = b"" if name == "calls" else b'"messages":[{"role":"user","content":"hi"}],'
                body = b'{"model":"tiny",%b%b,"user":"%b"}' % (
                    messages,
                    field % nested(depth),
                    b"x" * size_bytes,
                )
                answer = await site.ask("POST", "/v1/chat/completions", body)
                assert answer.status < 500, (name, depth, answer.body)
                statuses.add(answer.status)
        assert statuses == {200, 400}


async def test_an_expectation_that_cannot_be_met_is_417_with_an_id() -> None:
    async with serving() as site:
        answer = await site.ask("POST", "/v1/chat/completions", chat(), "Expect: the-impossible")
        assert answer.status == 417
        assert answer.headers["x-request-id"]


async def test_a_huge_prompt_that_might_fit_is_tokenized_and_refused() -> None:
    dispatcher = ScriptedDispatcher(SPEAK, [tiny_card(context_length=20_000)])
    async with serving(dispatcher=dispatcher) as site:
        huge = chat(messages=[{"role": "user", "content": "the lazy dog, é 1 " * 6_000}])
        answer = await site.ask("POST", "/v1/chat/completions", huge)
        assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
