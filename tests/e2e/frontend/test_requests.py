"""How requests arrive at a frontend, over real sockets, and what is refused: each in the API's own shape, and the next one is served."""

import asyncio
import gzip
import zlib

import openai
import pytest
from frontend_site import HI, SPEAK, Answer, Site, bomb, chat, http, serving

from penstock.frontend.encoders import LARGE_BYTES
from tests.support.dispatcher import ScriptedDispatcher
from tests.support.tokenizer import tiny_card
from tests.support.tool_talk import SAID, says

PATH = "/v1/chat/completions"


async def unfinished(site: Site, size_bytes: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send all of a body but its last byte."""
    reader, writer = await site.connect()
    writer.write(http("POST", PATH, b"", f"Content-Length: {size_bytes}") + b" " * (size_bytes - 1))
    return reader, writer


async def until_received(site: Site, size_bytes: int) -> None:
    await site.until(lambda: site.frontend.budget.size_bytes >= size_bytes)


async def test_a_body_that_does_not_come_in_time_is_408() -> None:
    async with serving(receive={"timeout_s": 0.1}) as site:
        reader, writer = await unfinished(site, 1000)
        answer = Answer(await reader.readuntil(b"}}"))
        assert (answer.status, answer.error["code"]) == (408, "receive_timeout")
        assert "frontend.receive.timeout_s" in answer.error["message"]
        writer.close()
        assert await site.metric('penstock_frontend_refused_bodies_total{reason="body_late"}') == 1


async def test_headers_that_do_not_come_in_time_are_408() -> None:
    async with serving(receive={"timeout_s": 0.1}) as site:
        reader, writer = await site.connect()
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: te")
        answer = Answer(await reader.read())
        assert (answer.status, answer.error["code"]) == (408, "receive_timeout")
        writer.close()
        # On a connection that stands, the time begins with the next request's first byte.
        reader, writer = await site.connect()
        writer.write(http("GET", "/live"))
        assert b"live" in await reader.readuntil(b"}")
        await asyncio.sleep(0.15)
        writer.write(http("GET", "/live")[:10])
        assert Answer(await reader.read()).status == 408
        writer.close()
        assert await site.metric('penstock_frontend_refused_bodies_total{reason="headers_late"}') == 2


async def test_headers_in_parts_are_taken() -> None:
    async with serving(receive={"timeout_s": 1.0}) as site:
        reader, writer = await site.connect()
        for _ in range(2):
            raw = http("POST", PATH, chat())
            writer.write(raw[:30])
            await until_received(site, 30)
            writer.write(raw[30:])
            assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
            await site.until(lambda: site.frontend.budget.size_bytes == 0)
            await reader.readuntil(b'"cached_tokens":0}}}')
        await asyncio.sleep(1.3)
        writer.write(http("GET", "/live"))
        assert b"200 OK" in await reader.readuntil(b"}")
        writer.close()


async def test_the_room_for_unfinished_bodies_is_bounded_and_small_requests_still_fit() -> None:
    room = 200_000
    async with serving(body_bytes_max=50_000, receive={"bytes_max": room}) as site:
        most = 0
        connections = []
        for _ in range(20):
            connections.append(await unfinished(site, 40_000))
            await asyncio.sleep(0)
            most = max(most, site.frontend.budget.size_bytes)
            assert (await site.ask("POST", PATH, chat(user="u" * 5000))).status == 200
        assert 100_000 < most <= room
        refused = [reader for reader, _ in connections if reader._buffer]  # type: ignore[attr-defined]
        assert len(refused) >= 15
        answer = Answer(await refused[0].readuntil(b"}}"))
        assert (answer.status, answer.error["code"]) == (503, "overloaded")
        assert answer.headers["retry-after"] == "1"
        assert await site.metric('penstock_frontend_refused_bodies_total{reason="room"}') == len(refused)
        assert await site.metric("penstock_frontend_received_bytes") > 0
        for _, writer in connections:
            writer.close()
        await site.until(lambda: site.frontend.budget.size_bytes == 0)


async def test_compressed_bodies_are_inflated() -> None:
    body = chat(user="u" * 60_000)
    raw = zlib.compressobj(wbits=-15)
    async with serving() as site:
        for name, packed in (
            ("gzip", gzip.compress(body)),
            ("gzip", gzip.compress(body[:1000]) + gzip.compress(body[1000:])),
            ("deflate", zlib.compress(body)),
            ("deflate", raw.compress(body) + raw.flush()),
            ("identity", body),
        ):
            answer = await site.ask("POST", PATH, packed, f"Content-Encoding: {name}")
            assert answer.status == 200, name
            assert site.frontend.budget.size_bytes == 0


async def test_a_body_that_is_not_what_its_encoding_says_is_refused_and_the_connection_stays() -> None:
    async with serving() as site:
        reader, writer = await site.connect()
        for body, encoding in (
            (b"not gzip at all", "gzip"),
            (gzip.compress(chat())[:-4], "gzip"),
            (gzip.compress(chat()) + b"and more", "gzip"),
            (gzip.compress(b"") * 40 + gzip.compress(chat()), "gzip"),  # 41 members
            (b"\xff\xff\xff", "deflate"),
            (zlib.compress(chat()) + b"more", "deflate"),
        ):
            writer.write(http("POST", PATH, body, f"Content-Encoding: {encoding}"))
            answer = Answer(await reader.readuntil(b"}}"))
            assert (answer.status, f"not valid {encoding}" in answer.error["message"]) == (400, True), body
        writer.write(http("GET", "/live"))
        assert Answer(await reader.readuntil(b"}")).status == 200
        writer.close()


async def test_a_bomb_is_not_inflated_past_the_largest_body() -> None:
    body = bomb(256 << 20)
    most = 0

    async def watch(site: Site) -> None:
        nonlocal most
        while True:
            most = max(most, site.frontend.budget.size_bytes)
            await asyncio.sleep(0.001)

    async with serving(receive={"timeout_s": 60.0}) as site:
        reader, writer = await site.connect()
        watching = asyncio.ensure_future(watch(site))
        writer.write(http("POST", PATH, body, "Content-Encoding: gzip"))
        answer = Answer(await reader.readuntil(b"}}"))
        watching.cancel()
        assert (answer.status, answer.error["code"]) == (413, "request_too_large")
        assert most <= len(body) + (8 << 20)
        # All of it has been read: the connection goes on at once.
        writer.write(http("GET", "/live"))
        assert Answer(await reader.readuntil(b"}")).status == 200
        writer.close()


async def test_closing_waits_for_a_body_on_its_way() -> None:
    async with serving() as site:
        body = chat()
        reader, writer = await site.connect()
        writer.write(http("POST", PATH, body)[:-1])
        await until_received(site, len(body) - 1)
        closing = asyncio.ensure_future(site.server.close())
        await asyncio.sleep(0.02)
        writer.write(body[-1:])
        assert Answer(await reader.read()).status == 200
        await closing
        writer.close()


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
        assert answer.error["message"] == "/v2/nothing does not exist; GET /docs lists the paths"
        answer = await site.ask("POST", "/v1/chat/completion", b"{}")
        assert answer.error["message"].endswith("did you mean '/v1/chat/completions'?")
        answer = await site.ask("GET", "/v1/chat/completions")
        assert (answer.status, answer.error["code"]) == (405, "method_not_allowed")
        assert answer.headers["allow"] == "POST"


async def test_what_is_not_http_is_refused_in_the_apis_shape() -> None:
    raws = (
        b"\x16\x03\x01 nonsense\r\n\r\n",
        b"GARBAGE\r\n\r\n",
        b"GET /live HTTP/1.1\r\nHost: localhost\r\nX-Odd: a\x01b\r\n\r\n",
        b"GET /live HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"x" * 9000 + b"\r\n\r\n",
        b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -4\r\n\r\n",
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
