"""The frontend over real sockets, with the openai client and by hand, against a scripted dispatcher."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import openai
import pytest
import uvloop
from tokenizers import Tokenizer

from penstock.core.errors import ConfigError, EngineError, Unavailable
from penstock.core.types import Delta, FinishReason, Request, TokenLogprob
from penstock.core.wire import pack_tokens
from penstock.frontend.completion import TextEvent
from penstock.frontend.config import FrontendConfig
from penstock.frontend.frontend import Frontend
from penstock.frontend.http import _SseResponse
from penstock.frontend.server import FrontendServer
from penstock.testing.dispatcher import Script, ScriptedDispatcher, speak
from penstock.testing.tokenizer import tiny_card, tiny_tokenizer_json

TOKENIZER = Tokenizer.from_buffer(tiny_tokenizer_json())
TEXT = "the quick brown fox jumps 你好 🎉"
IDS = TOKENIZER.encode(TEXT).ids
STOP_TOKEN = 0
HI = [{"role": "user", "content": "hello"}]
SPEAK = speak([*IDS, STOP_TOKEN], finish=FinishReason.STOP)


class Site:
    """A running frontend and ways to reach it."""

    def __init__(
        self, dispatcher: ScriptedDispatcher, frontend: Frontend, server: FrontendServer, port: int
    ) -> None:
        self.dispatcher = dispatcher
        self.frontend = frontend
        self.server = server
        self.port = port
        self.client = openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0
        )

    async def until(self, true: Callable[[], bool], timeout_s: float = 5.0) -> float:
        """Wait until something holds; give how long it took."""
        loop = asyncio.get_running_loop()
        start = loop.time()
        async with asyncio.timeout(timeout_s):
            while not true():  # noqa: ASYNC110 - what is waited for has no event
                await asyncio.sleep(0.001)
        return loop.time() - start

    async def connect(self, **options) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port, **options)

    async def ask(self, method: str, path: str, body: bytes = b"", *headers: str) -> "Answer":
        """One request on one connection, by hand."""
        reader, writer = await self.connect()
        writer.write(http(method, path, body, "Connection: close", *headers))
        raw = await reader.read()
        writer.close()
        return Answer(raw)


class Answer:
    def __init__(self, raw: bytes) -> None:
        head, _, self.body = raw.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        self.status = int(first.split()[1])
        self.headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}

    @property
    def error(self) -> dict:
        return json.loads(self.body)["error"]


def http(method: str, path: str, body: bytes = b"", *headers: str) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: test", *headers]
    if body and not any(header.lower().startswith(("content-length", "transfer")) for header in headers):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def chat(**fields: object) -> bytes:
    return json.dumps({"model": "tiny", "messages": HI, **fields}).encode()


@contextlib.asynccontextmanager
async def serving(
    script: Script = SPEAK, dispatcher: ScriptedDispatcher | None = None, **config
) -> AsyncIterator[Site]:
    dispatcher = dispatcher or ScriptedDispatcher(script)
    frontend = Frontend(FrontendConfig(port=0, **config), dispatcher, hash_key=bytes(16))
    server = FrontendServer(frontend)
    _, port = await server.start()
    site = Site(dispatcher, frontend, server, port)
    try:
        yield site
    finally:
        await site.client.close()
        await server.close()
        assert dispatcher.open_streams == 0


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60):
            await test()

    uvloop.run(main())


# --- answers


def test_a_session_is_taken_from_its_header() -> None:
    async def test() -> None:
        async with serving(session_header="X-Talk") as site:
            path = "/v1/chat/completions"
            for headers in (["X-Talk: t-1"], ["X-Session-Id: other"], ["X-Talk: "]):
                assert (await site.ask("POST", path, chat(), *headers)).status == 200
            assert [request.session for request in site.dispatcher.opened] == ["t-1", None, None]
            refused = await site.ask("POST", path, chat(), "X-Talk: " + "t" * 257)
            assert refused.status == 400
            assert refused.error["message"] == "X-Talk: must have at most 256 characters, got 257"

    run(test)


def test_a_chat_streams_and_does_not() -> None:
    async def test() -> None:
        async with serving() as site:
            whole = await site.client.chat.completions.create(model="tiny", messages=HI)
            assert whole.choices[0].message.content == TEXT
            assert whole.choices[0].finish_reason == "stop"
            assert whole.usage is not None
            assert whole.usage.completion_tokens == len(IDS) + 1
            stream = await site.client.chat.completions.create(
                model="tiny", messages=HI, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            assert chunks[0].choices[0].delta.role == "assistant"
            assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == TEXT
            assert chunks[-2].choices[0].finish_reason == "stop"
            assert chunks[-1].choices == []
            assert chunks[-1].usage == whole.usage
            assert len({chunk.id for chunk in chunks}) == 1

    run(test)


def test_completions_of_many_prompts_and_choices() -> None:
    async def test() -> None:
        async with serving() as site:
            whole = await site.client.completions.create(
                model="tiny", prompt=["one", "two"], n=2, max_tokens=100
            )
            assert [(choice.index, choice.text) for choice in whole.choices] == [(i, TEXT) for i in range(4)]
            stream = await site.client.completions.create(
                model="tiny", prompt=IDS, n=3, max_tokens=100, stream=True
            )
            texts, reasons, order = [""] * 3, [""] * 3, []
            async for chunk in stream:
                (choice,) = chunk.choices
                texts[choice.index] += choice.text
                reasons[choice.index] = choice.finish_reason or ""
                order.append(choice.index)
            assert texts == [TEXT] * 3
            assert reasons == ["stop"] * 3
            assert order[:6] != sorted(order[:6])  # interleaved

    run(test)


def test_stop_strings_across_chunks_and_their_usage() -> None:
    async def test() -> None:
        async with serving(speak(IDS * 50)) as site:
            stream = await site.client.chat.completions.create(
                model="tiny",
                messages=HI,
                stop=["n fox j", "never"],
                stream=True,
                stream_options={"include_usage": True},
            )
            chunks = [chunk async for chunk in stream]
            text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
            assert text == "the quick brow"
            assert chunks[-2].choices[0].finish_reason == "stop"
            usage = chunks[-1].usage
            assert usage is not None
            assert "n fox j" in TOKENIZER.decode(IDS[: usage.completion_tokens])
            assert "n fox j" not in TOKENIZER.decode(IDS[: usage.completion_tokens - 1])
            assert site.dispatcher.cancelled == 1

    run(test)


async def _with_logprobs(request: Request) -> AsyncIterator[Delta]:
    for index, token_id in enumerate(IDS):
        top = tuple(
            (other, -0.5 - rank) for rank, other in enumerate([token_id, 7, 8][: request.sampling.logprobs])
        )
        yield Delta(
            request_id=request.request_id,
            token_ids=pack_tokens([token_id]),
            logprobs=(TokenLogprob(token_id=token_id, logprob=-0.5, top=top),),
            finish_reason=FinishReason.LENGTH if index == len(IDS) - 1 else None,
        )


def test_logprobs_in_both_shapes() -> None:
    async def test() -> None:
        async with serving(_with_logprobs) as site:
            whole = await site.client.chat.completions.create(
                model="tiny", messages=HI, logprobs=True, top_logprobs=2
            )
            assert whole.choices[0].logprobs is not None
            content = whole.choices[0].logprobs.content or []
            assert b"".join(bytes(entry.bytes or []) for entry in content).decode() == TEXT
            assert {len(entry.top_logprobs) for entry in content} == {2}
            stream = await site.client.chat.completions.create(
                model="tiny", messages=HI, logprobs=True, stream=True
            )
            streamed = [c.choices[0].logprobs async for c in stream if c.choices[0].logprobs]
            assert [e.token for lp in streamed for e in lp.content or []] == [e.token for e in content]
            plain = await site.client.completions.create(model="tiny", prompt="x", logprobs=1)
            logprobs = plain.choices[0].logprobs
            assert logprobs is not None
            assert logprobs.text_offset is not None
            assert len(logprobs.tokens or []) == len(logprobs.text_offset) == len(IDS)
            assert logprobs.text_offset[0] == 0

    run(test)


def test_tokens_that_arrive_together_are_one_chunk() -> None:
    async def test() -> None:
        async with serving(speak(IDS, at_once=len(IDS))) as site:
            answer = await site.ask("POST", "/v1/completions", b'{"model":"tiny","prompt":"x","stream":true}')
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert answer.body.count(b"data: ") == 2
            assert b"data: [DONE]\n\n" in answer.body

    run(test)


def test_a_request_reaches_the_dispatcher_as_it_was_meant() -> None:
    async def test() -> None:
        async with serving() as site:
            await site.client.chat.completions.create(
                model="tiny",
                messages=HI,
                temperature=0.5,
                top_p=0.9,
                seed=7,
                max_tokens=9,
                presence_penalty=0.1,
                extra_body={
                    "top_k": 4,
                    "min_p": 0.1,
                    "ignore_eos": True,
                    "min_tokens": 2,
                    "stop_token_ids": [9],
                },
            )
            (request,) = site.dispatcher.opened
            sampling = request.sampling
            assert (sampling.temperature, sampling.top_p, sampling.seed, sampling.max_tokens) == (
                0.5,
                0.9,
                7,
                9,
            )
            assert (sampling.top_k, sampling.min_p, sampling.ignore_eos, sampling.min_tokens) == (
                4,
                0.1,
                True,
                2,
            )
            assert (sampling.presence_penalty, sampling.stop_token_ids) == (0.1, (9,))
            assert 0 < (request.deadline_s or 0) <= 600

    run(test)


# --- bad input


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "says"),
    [
        ("chat/completions", b'{"model": "tiny", "messages": [', 400, None, "not valid JSON"),
        ("chat/completions", b'{"model": "\xff\xfe"}', 400, None, "not valid UTF-8"),
        ("chat/completions", b"", 400, None, "the body is empty"),
        ("chat/completions", b"[1]", 400, None, "expected object"),
        ("chat/completions", chat(model="none"), 404, "model", "'none' does not exist here; models: tiny"),
        ("chat/completions", chat(max_tokens=-1), 400, "max_tokens", "must be >= 1, got -1"),
        ("chat/completions", chat(max_tokens="many"), 400, "max_tokens", "expected int"),
        ("chat/completions", chat(temperature=3), 400, "temperature", "must be >= 0 and <= 2, got 3"),
        ("chat/completions", chat(n=1000), 400, "n", "must be >= 1 and <= 128, got 1000"),
        ("chat/completions", chat(logit_bias={"1": 2}), 400, "logit_bias", "not supported"),
        ("chat/completions", chat(tools=[{"type": "function"}]), 400, "tools", "not supported"),
        ("chat/completions", chat(max_tokns=1), 400, "max_tokns", "did you mean 'max_tokens'?"),
        ("chat/completions", chat(messages=[]), 400, "messages", "at least one message"),
        ("chat/completions", chat(messages=[{"role": "user", "content": "a" * 2000}]), 400, "messages", "context of 512"),
        ("chat/completions", chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]), 400, "messages[0].content[0].type", "text only"),
        ("chat/completions", chat(chat_template_kwargs={"messages": 1}), 400, "chat_template_kwargs.messages", "leave it out"),
        ("completions", b'{"model":"tiny","prompt":[99999999]}', 400, "prompt", "token ids must be"),
        ("completions", b'{"model":"tiny","prompt":"x","max_tokens":512}', 400, "max_tokens", "context of 512"),
        ("completions", b'{"model":"tiny"}', 400, "prompt", "required, but missing"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_in_the_apis_shape(
    path: str, body: bytes, status: int, param: str | None, says: str
) -> None:
    async def test() -> None:
        async with serving() as site:
            answer = await site.ask("POST", f"/v1/{path}", body)
            assert answer.status == status
            assert answer.error["param"] == param
            assert says in answer.error["message"]
            assert answer.error["type"] == "invalid_request_error"
            assert site.dispatcher.opened == []

    run(test)


def test_the_openai_client_understands_refusals() -> None:
    async def test() -> None:
        async with serving() as site:
            with pytest.raises(openai.NotFoundError) as missing:
                await site.client.chat.completions.create(model="none", messages=HI)
            assert missing.value.code == "model_not_found"
            with pytest.raises(openai.BadRequestError) as bad:
                await site.client.chat.completions.create(
                    model="tiny", messages=HI, max_tokens=-1, stream=True
                )
            assert bad.value.param == "max_tokens"

    run(test)


@pytest.mark.parametrize("how", ["content-length", "chunked", "gzip"])
def test_a_body_too_large_is_413(how: str) -> None:
    import gzip

    async def test() -> None:
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

    run(test)


def test_unknown_paths_and_methods_have_the_apis_shape() -> None:
    async def test() -> None:
        async with serving() as site:
            answer = await site.ask("GET", "/v2/nothing")
            assert (answer.status, answer.error["code"]) == (404, "path_not_found")
            answer = await site.ask("GET", "/v1/chat/completions")
            assert (answer.status, answer.error["code"]) == (405, "method_not_allowed")
            assert answer.headers["allow"] == "POST"

    run(test)


@pytest.mark.parametrize(
    "raw",
    [
        b"\x16\x03\x01 nonsense\r\n\r\n",
        b"GARBAGE\r\n\r\n",
        b"GET /live HTTP/1.1\r\nHost: test\r\nX-Odd: a\x01b\r\n\r\n",
        b"GET /live HTTP/1.1\r\nHost: test\r\nX-Long: " + b"x" * 9000 + b"\r\n\r\n",
        b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\nHost: test\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: test\r\nContent-Length: -4\r\n\r\n",
    ],
)
def test_what_is_not_http_is_refused_in_the_apis_shape(raw: bytes) -> None:
    async def test() -> None:
        async with serving() as site:
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
            metrics = (await site.ask("GET", "/metrics")).body.decode()
            assert 'penstock_frontend_requests_total{code="400",route="unknown"} 1.0' in metrics

    run(test)


@pytest.mark.parametrize("encoding", ["zap", "br", "zstd", "gzip, gzip"])
def test_an_unknown_encoding_of_the_body_is_named(encoding: str) -> None:
    async def test() -> None:
        async with serving() as site:
            answer = await site.ask("POST", "/v1/chat/completions", chat(), f"Content-Encoding: {encoding}")
            assert (answer.status, answer.error["code"]) == (415, "unsupported_encoding")
            assert encoding in answer.error["message"]
            assert answer.error["message"].endswith("; send one of gzip, deflate, identity")

    run(test)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_body_that_is_not_encoded_as_it_says_is_refused_in_one_line(encoding: str) -> None:
    async def test() -> None:
        async with serving() as site:
            answer = await site.ask("POST", "/v1/chat/completions", chat(), f"Content-Encoding: {encoding}")
            assert answer.status == 400
            assert answer.error["message"] == (
                f"the body cannot be read: Can not decode content-encoding: {encoding}"
            )

    run(test)


def test_an_expectation_that_cannot_be_met_is_417_with_an_id() -> None:
    async def test() -> None:
        async with serving() as site:
            answer = await site.ask("POST", "/v1/chat/completions", chat(), "Expect: the-impossible")
            assert answer.status == 417
            assert answer.headers["x-request-id"]

    run(test)


def test_metrics_have_no_times_of_creation() -> None:
    async def test() -> None:
        async with serving() as site:
            await site.ask("POST", "/v1/chat/completions", chat())
            assert b"_created" not in (await site.ask("GET", "/metrics")).body

    run(test)


def test_a_huge_prompt_is_refused_without_holding_up_others() -> None:
    async def test() -> None:
        # Few enough bytes that they might fit: they are tokenized before they are refused.
        dispatcher = ScriptedDispatcher(SPEAK, [tiny_card(context_length=200_000)])
        async with serving(dispatcher=dispatcher) as site:
            loop = asyncio.get_running_loop()
            await site.ask("POST", "/v1/chat/completions", chat())  # the model is loaded
            start = loop.time()
            huge = chat(messages=[{"role": "user", "content": "the lazy dog, é 1 " * 60_000}])
            asking = asyncio.ensure_future(site.ask("POST", "/v1/chat/completions", huge))
            longest_s = 0.0
            while not asking.done():
                asked = loop.time()
                await site.ask("GET", "/live")
                longest_s = max(longest_s, loop.time() - asked)
            answer = await asking
            assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
            assert longest_s < (loop.time() - start) / 2

    run(test)


# --- failures


def test_a_failure_before_the_first_token_has_its_own_status() -> None:
    async def failing(request: Request) -> AsyncIterator[Delta]:
        raise Unavailable("no worker is left", retry_after_s=1.5)
        yield Delta(request_id=request.request_id)

    async def test() -> None:
        async with serving(failing) as site:
            for stream in (True, False):
                answer = await site.ask("POST", "/v1/chat/completions", chat(stream=stream))
                assert answer.status == 503
                assert answer.headers["retry-after"] == "2"
                assert answer.error == {
                    "message": "no worker is left", "type": "server_error", "param": None, "code": "unavailable",
                }  # fmt: skip

    run(test)


def test_a_failure_in_a_stream_is_an_event_without_done() -> None:
    async def failing(request: Request) -> AsyncIterator[Delta]:
        yield Delta(request_id=request.request_id, token_ids=pack_tokens(IDS[:1]))
        raise EngineError("the engine failed on this request")

    async def test() -> None:
        async with serving(failing) as site:
            answer = await site.ask("POST", "/v1/chat/completions", chat(stream=True))
            assert answer.status == 200
            assert b'"code":"engine_error"' in answer.body
            assert b"[DONE]" not in answer.body
            stream = await site.client.chat.completions.create(model="tiny", messages=HI, stream=True)
            with pytest.raises(openai.APIError, match="the engine failed"):
                async for _ in stream:
                    pass
            metrics = (await site.ask("GET", "/metrics")).body.decode()
            assert 'penstock_frontend_requests_total{code="500",route="/v1/chat/completions"} 2.0' in metrics

    run(test)


def test_an_unexpected_failure_is_a_500_without_details(capfd: pytest.CaptureFixture[str]) -> None:
    async def broken(request: Request) -> AsyncIterator[Delta]:
        if request.sampling.max_tokens == 5:
            yield Delta(request_id=request.request_id, token_ids=pack_tokens(IDS[:1]))
        raise KeyError("secret")

    async def test() -> None:
        async with serving(broken) as site:
            answer = await site.ask("POST", "/v1/chat/completions", chat(), "X-Request-Id: find-me")
            assert answer.status == 500
            assert "secret" not in answer.error["message"]
            body = chat(stream=True, max_tokens=5)
            answer = await site.ask("POST", "/v1/chat/completions", body, "X-Request-Id: me-too")
            assert answer.status == 200
            assert b'{"error":{"message":"the server failed' in answer.body
            assert answer.body.count(b"HTTP/1.1") == 0
            assert b"secret" not in answer.body

    run(test)
    out, err = capfd.readouterr()
    assert "find-me" in out + err
    assert "me-too" in out + err


def test_time_is_up_before_and_in_a_stream() -> None:
    async def slow(request: Request) -> AsyncIterator[Delta]:
        if request.num_emitted == 0 and request.sampling.max_tokens == 5:
            yield Delta(request_id=request.request_id, token_ids=pack_tokens(IDS[:1]))
        await asyncio.sleep(3600)

    async def test() -> None:
        async with serving(slow, request_timeout_s=0.2) as site:
            answer = await site.ask("POST", "/v1/chat/completions", chat())
            assert (answer.status, answer.error["code"]) == (504, "deadline_exceeded")
            answer = await site.ask("POST", "/v1/chat/completions", chat(stream=True, max_tokens=5))
            assert answer.status == 200
            assert b"deadline_exceeded" in answer.body

    run(test)


def test_one_request_too_many_is_503_with_retry_after() -> None:
    async def test() -> None:
        async with serving(speak(IDS, pause_s=0.02), inflight_max=1) as site:
            first = asyncio.ensure_future(site.ask("POST", "/v1/chat/completions", chat()))
            await site.until(lambda: site.dispatcher.open_streams == 1)
            answer = await site.ask("POST", "/v1/chat/completions", chat())
            assert (answer.status, answer.error["code"]) == (503, "overloaded")
            assert answer.headers["retry-after"] == "1"
            assert (await first).status == 200

    run(test)


# --- clients that go away, or do not read


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("abrupt", [True, False])
def test_a_client_that_goes_away_before_the_first_token_cancels(stream: bool, abrupt: bool) -> None:
    async def test() -> None:
        async with serving(speak(IDS, pause_s=3600)) as site:
            _, writer = await site.connect()
            writer.write(http("POST", "/v1/chat/completions", chat(stream=stream)))
            await site.until(lambda: site.dispatcher.open_streams == 1)
            writer.transport.abort() if abrupt else writer.close()
            took_s = await site.until(lambda: site.dispatcher.open_streams == 0)
            assert took_s < 0.1
            assert site.dispatcher.cancelled == 1
            await site.until(lambda: site.frontend.admission.inflight == 0)

    run(test)


def test_a_client_that_goes_away_in_a_stream_cancels_every_choice() -> None:
    async def test() -> None:
        async with serving(speak(IDS * 100, pause_s=0.005)) as site:
            stream = await site.client.chat.completions.create(model="tiny", messages=HI, n=3, stream=True)
            await anext(stream)
            assert site.dispatcher.open_streams == 3
            await stream.close()
            assert await site.until(lambda: site.dispatcher.open_streams == 0) < 0.1
            assert site.dispatcher.cancelled == 3
            metrics = (await site.ask("GET", "/metrics")).body.decode()
            assert 'penstock_frontend_requests_total{code="499",route="/v1/chat/completions"} 1.0' in metrics

    run(test)


async def stall(site: Site, **fields: Any) -> socket.socket:
    """Ask for a stream and never read it."""
    stalled = socket.socket()
    stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    stalled.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(stalled, ("127.0.0.1", site.port))
    await loop.sock_sendall(
        stalled, http("POST", "/v1/chat/completions", chat(stream=True, max_tokens=7, **fields))
    )
    return stalled


def test_a_reader_that_stalls_holds_back_its_own_stream_only() -> None:
    taken = {"stalled": 0}

    async def endless(request: Request) -> AsyncIterator[Delta]:
        if request.sampling.max_tokens != 7:
            async for delta in SPEAK(request):
                yield delta
            return
        while True:
            await asyncio.sleep(0)
            taken["stalled"] += 1
            yield Delta(request_id=request.request_id, token_ids=pack_tokens(IDS[:1]))

    async def test() -> None:
        async with serving(endless) as site:
            loop = asyncio.get_running_loop()
            stalled = await stall(site)
            before = -1
            while before != taken["stalled"]:  # until it stands still
                before = taken["stalled"]
                await asyncio.sleep(0.1)
            assert 0 < taken["stalled"] < 5000  # of some 200 bytes each
            start = loop.time()
            for _ in range(5):
                whole = await site.client.chat.completions.create(model="tiny", messages=HI)
                assert whole.choices[0].message.content == TEXT
            assert loop.time() - start < 2
            assert taken["stalled"] == before
            stalled.close()
            assert await site.until(lambda: site.dispatcher.open_streams == 0) < 0.1

    run(test)


def test_a_reader_that_stalls_before_the_last_event_is_cut_off_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens end just below the mark at which writing waits, and the usage that follows crosses it."""
    sent: list[_SseResponse] = []
    take = _SseResponse.take

    async def note(response: _SseResponse, event: TextEvent) -> None:
        sent[:] = [response]
        await take(response, event)

    monkeypatch.setattr(_SseResponse, "take", note)

    async def just_enough(request: Request) -> AsyncIterator[Delta]:
        for index in range(5000):
            await asyncio.sleep(0)
            transport = sent[0]._request.transport if sent else None
            if transport is not None:
                room = sent[0]._write_buffer_bytes - transport.get_write_buffer_size()
                if 245 <= room < 560:
                    break
            yield Delta(request_id=request.request_id, token_ids=pack_tokens(IDS[: 1 + (index % 3 == 0)]))
        yield Delta(
            request_id=request.request_id, token_ids=pack_tokens(IDS[:1]), finish_reason=FinishReason.LENGTH
        )

    async def test() -> None:
        async with serving(just_enough, request_timeout_s=2) as site:
            stalled = await stall(site, stream_options={"include_usage": True})
            await site.until(lambda: site.dispatcher.open_streams == 1)
            await site.until(lambda: site.dispatcher.open_streams == 0)
            await site.until(lambda: site.frontend.admission.inflight == 0, timeout_s=4)
            stalled.close()

    run(test)


def test_a_reader_that_stalls_is_cut_off_when_its_time_is_up() -> None:
    async def endless(request: Request) -> AsyncIterator[Delta]:
        while True:
            await asyncio.sleep(0)
            yield Delta(request_id=request.request_id, token_ids=pack_tokens(IDS[:1]))

    async def test() -> None:
        async with serving(endless, request_timeout_s=0.5) as site:
            stalled = await stall(site)
            await site.until(lambda: site.dispatcher.open_streams == 1)
            await site.until(lambda: site.dispatcher.open_streams == 0)
            await site.until(lambda: site.frontend.admission.inflight == 0, timeout_s=1)
            received = b""
            with contextlib.suppress(ConnectionResetError), stalled:
                while data := await asyncio.get_running_loop().sock_recv(stalled, 1 << 20):
                    received += data
            assert received
            assert not received.endswith(b"0\r\n\r\n")  # the client can tell that this is not the end

    run(test)


def test_http_1_0_gets_its_stream_without_chunks() -> None:
    async def test() -> None:
        async with serving() as site:
            reader, writer = await site.connect()
            body = chat(stream=True)
            writer.write(http("POST", "/v1/chat/completions", body).replace(b"HTTP/1.1", b"HTTP/1.0"))
            answer = Answer(await reader.read())
            writer.close()
            assert "transfer-encoding" not in answer.headers
            assert answer.body.endswith(b"data: [DONE]\n\n")

    run(test)


# --- the rest of the surface


def test_models_health_and_live() -> None:
    async def test() -> None:
        async with serving() as site:
            (model,) = [model async for model in site.client.models.list()]
            assert (model.id, model.owned_by, model.created) == ("tiny", "penstock", 1_700_000_000)
            assert (await site.client.models.retrieve("tiny")).id == "tiny"
            with pytest.raises(openai.NotFoundError):
                await site.client.models.retrieve("some/other")
            answer = await site.ask("GET", "/health")
            assert (answer.status, json.loads(answer.body)) == (200, {"status": "ok", "models": ["tiny"]})
            site.dispatcher.cards = {}
            answer = await site.ask("GET", "/health")
            assert (answer.status, json.loads(answer.body)["reason"]) == (503, "no worker is ready")
            assert (await site.ask("GET", "/live")).status == 200

    run(test)


def test_workers_are_shown_to_this_machine_only() -> None:
    async def test() -> None:
        async with serving() as site:
            answer = await site.ask("GET", "/admin/workers")
            assert json.loads(answer.body) == {"workers": [{"name": "scripted", "models": ["tiny"]}]}
            answer = await site.ask("GET", "/admin/workers", b"", "X-Forwarded-For: 203.0.113.9")
            assert (answer.status, answer.error["code"]) == (403, "forbidden")

    run(test)


def test_request_ids_are_echoed_or_made() -> None:
    async def test() -> None:
        async with serving() as site:
            assert (await site.ask("GET", "/live", b"", "X-Request-Id: mine")).headers[
                "x-request-id"
            ] == "mine"
            body = chat(stream=True)
            answer = await site.ask("POST", "/v1/chat/completions", body, "X-Request-Id: mine")
            assert answer.headers["x-request-id"] == "mine"
            made = {(await site.ask("GET", "/nowhere")).headers["x-request-id"] for _ in range(2)}
            made.add(
                (await site.ask("GET", "/live", b"", "X-Request-Id: " + "x" * 500)).headers["x-request-id"]
            )
            assert len(made) == 3

    run(test)


def test_answers_are_sent_without_delay() -> None:
    async def test() -> None:
        async with serving() as site:
            reader, writer = await site.connect()
            for _ in range(20):  # with Nagle's algorithm each of these would take 40 ms
                writer.write(http("POST", "/v1/chat/completions", chat(stream=True)))
                start = asyncio.get_running_loop().time()
                await reader.readuntil(b"0\r\n\r\n")
                took_s = asyncio.get_running_loop().time() - start
            assert took_s < 0.04
            writer.close()

    run(test)


# --- listening and closing


def test_closing_lets_streams_finish_and_takes_nothing_new() -> None:
    async def test() -> None:
        async with serving(speak(IDS, pause_s=0.01)) as site:
            idle_reader, idle_writer = await site.connect()
            running = asyncio.ensure_future(site.ask("POST", "/v1/chat/completions", chat(stream=True)))
            await site.until(lambda: site.dispatcher.open_streams == 1)
            closing = asyncio.ensure_future(site.server.close())
            await asyncio.sleep(0.02)
            with pytest.raises(ConnectionError):
                await site.connect()
            # A connection that was there is still answered, and then closed.
            idle_writer.write(http("GET", "/health"))
            assert Answer(await idle_reader.read()).status == 503
            idle_writer.close()
            answer = await running
            assert b"[DONE]" in answer.body
            await closing

    run(test)


def test_closing_ends_what_takes_too_long_with_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    async def test() -> None:
        async with serving(speak(IDS * 100, pause_s=0.05), drain_timeout_s=0.1) as site:
            running = asyncio.ensure_future(site.ask("POST", "/v1/chat/completions", chat(stream=True)))
            await site.until(lambda: site.dispatcher.open_streams == 1)
            await asyncio.sleep(0.1)
            await site.server.close()
            assert b"the server is shutting down" in (await running).body

    run(test)
    out, err = capfd.readouterr()
    assert (out + err).count("requests_given_up") == 1


def test_a_taken_port_is_one_clear_error() -> None:
    async def test() -> None:
        async with serving() as site:
            frontend = Frontend(FrontendConfig(port=site.port), site.dispatcher, hash_key=bytes(16))
            with pytest.raises(ConfigError, match=f"port {site.port}: Address already in use; .* --port"):
                await FrontendServer(frontend).start()

    run(test)


def test_two_frontends_share_a_port_that_is_held_for_them() -> None:
    async def test() -> None:
        with socket.socket() as held:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            held.bind(("127.0.0.1", 0))
            port = held.getsockname()[1]
            dispatchers = [ScriptedDispatcher(SPEAK), ScriptedDispatcher(SPEAK)]
            servers = [
                FrontendServer(Frontend(FrontendConfig(port=port), d, hash_key=bytes(16)), share_port=True)
                for d in dispatchers
            ]
            for server in servers:
                await server.start()
            site = Site(dispatchers[0], servers[0]._frontend, servers[0], port)
            for _ in range(100):
                assert (await site.ask("POST", "/v1/chat/completions", chat())).status == 200
                if all(dispatcher.opened for dispatcher in dispatchers):
                    break
            assert all(dispatcher.opened for dispatcher in dispatchers)
            await site.client.close()
            for server in servers:
                await server.close()

    run(test)
