"""`penstock bench serve` against a small server that can misbehave, over a real socket."""

import asyncio
import json
import threading
from collections import Counter
from pathlib import Path
from typing import Self

import pytest
from aiohttp import web

from penstock.cli import main

DATA = Path(__file__).parents[2] / "data"


class Server:
    """Streams `word` as often as asked. `misbehave(index)` names what to do to a request, None for nothing."""

    def __init__(self) -> None:
        self.misbehave = lambda index: None
        self.bodies: list[dict] = []
        self.peers: Counter[tuple] = Counter()
        self.under_way = self.most_under_way = 0
        self.tokens_per_chunk = 1
        self.keeps_connections = True
        self._started = threading.Event()
        self._stop: asyncio.Event
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._started.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    @property
    def measured(self) -> list[dict]:
        """What was sent after the two probes."""
        return self.bodies[2:]

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(client_max_size=1 << 24)
        app.router.add_post("/v1/chat/completions", self._answer)
        app.router.add_post("/v1/completions", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._started.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        if body["model"] != "known":
            return web.json_response({"error": {"message": "no model 'x'; there are: known"}}, status=404)
        peer = request.transport.get_extra_info("peername")
        self.peers[peer] += 1
        if self.peers[peer] > 1 and not self.keeps_connections:
            request.transport.abort()
            return web.Response()
        self.bodies.append(body)
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            return await self._stream(request, body, self.misbehave(len(self.bodies) - 3))
        finally:
            self.under_way -= 1

    async def _stream(self, request: web.Request, body: dict, misbehaviour: str | None) -> web.StreamResponse:
        if misbehaviour == "429":
            return web.json_response({"error": {"message": "try later"}}, status=429)
        chat = "messages" in body
        prompt = body["messages"][0]["content"] if chat else body["prompt"]
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for index in range(0, body["max_tokens"], self.tokens_per_chunk):
            if misbehaviour == "hang":
                await asyncio.sleep(30)
            if misbehaviour == "disconnect" and index == 2:
                request.transport.abort()
                return answer
            if misbehaviour == "error" and index == 2:
                await answer.write(b'data: {"error":{"message":"all workers are lost"}}\n\n')
                break
            await asyncio.sleep(0.001)
            piece = {"delta": {"content": "word"}} if chat else {"text": "word"}
            await answer.write(b"data: " + json.dumps({"choices": [piece]}).encode() + b"\n\n")
        usage = {"prompt_tokens": len(prompt.split()) + 9, "completion_tokens": body["max_tokens"]}
        await answer.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
        await answer.write(b"data: [DONE]\n\n")
        await answer.write_eof()
        return answer


@pytest.fixture
def server():
    with Server() as running:
        yield running


@pytest.fixture
def bench(server, tmp_path):
    """Run the command against the server; gives the exit code and the report."""

    def run(*arguments: object) -> tuple[int, dict]:
        out = tmp_path / "report.json"
        out.unlink(missing_ok=True)
        words = ["bench", "serve", "--url", server.url, "--model", "known", "--json", out, *arguments]
        code = main([str(word) for word in words])
        return code, json.loads(out.read_text()) if out.exists() else {}

    return run


def test_a_closed_load_sends_what_was_asked(server, bench):
    code, report = bench("--requests", 40, "--concurrency", 5, "--input-tokens", 60, "--output-tokens", 7)
    assert code == 0
    assert (report["name"], report["config"]["mode"]) == ("serve", "closed")
    figures = report["figures"]
    assert figures["requests"] == 40
    assert figures["failed_requests"] == 0
    assert figures["output_tokens_mean"] == 7
    assert figures["input_tokens_mean"] == 60
    assert figures["tokens_per_chunk"] == 1
    assert 0 <= figures["itl_ms_p50"] <= figures["itl_ms_p99"]
    assert 0 < figures["ttft_ms_p50"] <= figures["e2e_ms_p50"]
    assert len(report["samples"]["ttft_s"]) == 40
    assert 1 < server.most_under_way <= 5
    assert len(server.peers) <= 5, "connections are kept, the probe's among them"
    body = server.measured[0]
    assert (body["max_tokens"], body["min_tokens"], body["ignore_eos"]) == (7, 7, True)
    assert len({sent["messages"][0]["content"] for sent in server.measured}) == 40


def test_a_random_load_has_its_rate_and_goodput(server, bench):
    code, report = bench(
        "--rate", 100, "--duration", 1, "--output-tokens", 2, "--slo-ttft", 5, "--slo-itl", 5
    )
    assert code == 0
    assert report["figures"]["requests"] > 1
    assert report["figures"]["goodput_fraction"] == 1.0
    assert report["config"]["mode"] == "rate"


def test_a_trace_is_replayed_with_its_prefixes(server, bench):
    arguments = ("--trace", DATA / "mooncake_trace.jsonl", "--input-tokens", 1500, "--output-tokens", 3)
    code, report = bench(*arguments)
    assert code == 0
    assert report["figures"]["requests"] == 6
    assert report["config"]["trace"] == "mooncake_trace.jsonl"
    first, second = (sent["messages"][0]["content"].split() for sent in server.measured[:2])
    assert first[:512] == second[:512]
    assert first[512:600] != second[512:600]
    assert len(first) == 1500 - 9


@pytest.mark.parametrize(
    ("misbehaviour", "failure"),
    [
        ("429", "http_429: try later"),
        ("disconnect", "disconnected: the connection was closed within the answer"),
        ("error", "stream_error: all workers are lost"),
        ("hang", "timeout: no end of the answer after 1 s"),
    ],
)
def test_failures_are_counted_by_kind(misbehaviour, failure, server, bench, capsys):
    server.misbehave = lambda index: misbehaviour if index in (3, 7) else None
    code, report = bench("--requests", 12, "--concurrency", 3, "--output-tokens", 5, "--timeout", 1)
    assert code == 1
    kind = failure.partition(":")[0]
    assert report["figures"]["failed_requests"] == report["figures"][f"failed_{kind}"] == 2
    assert len(report["samples"]["ttft_s"]) == 10
    assert f"penstock bench serve: 2 of 12 requests failed: {failure}" in capsys.readouterr().err


def test_a_kept_connection_that_the_server_gave_up_is_no_failure(server, bench):
    server.keeps_connections = False
    code, report = bench("--requests", 5, "--concurrency", 1, "--output-tokens", 1)
    assert (code, report["figures"]["failed_requests"]) == (0, 0)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--url", "nowhere"], "--url: 'nowhere': expected a URL such as http://127.0.0.1:8000"),
        (["--model", "x"], "answers 404: no model 'x'; there are: known"),
        (["--rate", "fast"], "argument --rate: expected a number > 0, got 'fast'"),
        (["--rate", "1", "--trace", "x"], "argument --trace: not allowed with argument --rate"),
        (["--speed", "2"], "--speed: only with --trace"),
        (["--trace", "missing.csv"], "missing.csv: cannot be read: No such file or directory"),
        (["--slo-tft", "2"], "unknown flag --slo-tft; did you mean '--slo-ttft'?"),
    ],
)
def test_wrong_input_is_one_line_and_exit_2(arguments, line, bench, capsys):
    code, report = bench(*arguments)
    assert (code, report) == (2, {})
    out, err = capsys.readouterr()
    assert line in err
    assert (out, err.count("\n")) == ("", 1)


def test_nobody_at_the_address_is_one_line_and_exit_1(bench, capsys):
    code, report = bench("--url", "http://127.0.0.1:1")
    assert (code, report) == (1, {})
    assert "nobody answers (Connection refused)" in capsys.readouterr().err
