"""The access log and W3C trace context over real sockets: one line for each request, and a trace that reaches the worker."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from frontend_site import ADMIN, SPEAK, chat, of_keys, serving

from penstock.core.errors import ConfigError
from penstock.core.types.requests import Delta, Request
from penstock.core.types.trace import TraceContext
from penstock.frontend.http.access_log import AccessLog

CHAT = "/v1/chat/completions"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"


def lines_of(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


async def test_each_request_has_one_line_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_LOG_FORMAT", "json")
    file = tmp_path / "access.log"
    async with serving(access_log=str(file), tenants=of_keys("a")) as site:
        key = "Authorization: Bearer a"
        told = await site.ask("POST", CHAT, chat(), key, "X-Request-Id: r1", f"traceparent: {PARENT}")
        body = json.loads(told.body)
        await site.ask("POST", CHAT, chat(stream=True), key)
        await site.ask("POST", CHAT, chat(), "Authorization: Bearer wrong")
        await site.ask("POST", CHAT, chat(max_tokens=-1), key)
        await site.ask("GET", "/v1/models?key=secret", b"", key)
        await site.ask("GET", "/no%0Awhere", b"", 'X-Request-Id: a "b"')
        await site.ask("GET", "/admin/workers", b"", ADMIN)
        _, writer = await site.connect()
        writer.write(b"nonsense\r\n\r\n")
        await site.until(lambda: len(lines_of(file)) == 8)
        writer.close()
        whole, stream, wrong, bad, models, nowhere, admin, garbage = lines_of(file)
        usage = body["usage"]
        assert whole["time"].endswith("+00:00")
        assert 0 <= whole.pop("ttft_s") <= whole.pop("duration_s") < 5
        del whole["time"]
        assert whole == {
            "status": 200, "method": "POST", "path": CHAT, "client": "127.0.0.1", "request_id": "r1", "trace_id": TRACE,
            "tenant": "tenant-a", "model": "tiny", "answer_id": body["id"], "stream": False,
            "prompt_tokens": usage["prompt_tokens"], "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "output_tokens": usage["completion_tokens"],
        }  # fmt: skip
        assert (stream["status"], stream["stream"], stream["output_tokens"]) == (
            200,
            True,
            usage["completion_tokens"],
        )
        assert "trace_id" not in stream
        assert (wrong["status"], "tenant" in wrong, "model" in wrong) == (401, False, False)
        assert (bad["status"], bad["tenant"], "model" in bad) == (400, "tenant-a", False)
        assert (models["path"], models["status"]) == ("/v1/models", 200), "a query may hold secrets"
        assert (nowhere["path"], nowhere["status"], nowhere["request_id"]) == ("/no%0Awhere", 404, 'a "b"')
        assert (admin["path"], admin["status"]) == ("/admin/workers", 200)
        assert (garbage["method"], garbage["status"]) == ("-", 400)
        (first, *_) = site.dispatcher.opened
        assert first.trace == TraceContext(request_id="r1", traceparent=PARENT)
        assert site.dispatcher.opened[1].trace is None


async def test_a_client_that_leaves_has_a_line_too_and_text_is_for_people(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PENSTOCK_LOG_FORMAT", raising=False)
    file = tmp_path / "access.log"

    async def never(request: Request) -> AsyncIterator[Delta]:
        await asyncio.sleep(3600)
        async for delta in SPEAK(request):
            yield delta

    async with serving(never, access_log=str(file)) as site:
        body = chat()
        head = (
            f'POST {CHAT} HTTP/1.1\r\nHost: x\r\nX-Request-Id: a "b"\r\nContent-Length: {len(body)}\r\n\r\n'
        )
        _, writer = await site.connect()
        writer.write(head.encode() + body)
        await site.until(lambda: site.dispatcher.open_streams == 1)
        writer.transport.abort()
        await site.until(lambda: file.read_text().endswith("\n"))
        (line,) = file.read_text().splitlines()
        time, status, method, path, rest = line.split(" ", 4)
        assert (status, method, path) == ("499", "POST", CHAT)
        assert time.startswith("20")
        assert 'client=127.0.0.1 request_id="a \\"b\\"" model=tiny' in rest
        assert rest.endswith("output_tokens=0")


async def test_a_file_that_was_moved_away_is_opened_anew(tmp_path: Path) -> None:
    file, moved = tmp_path / "access.log", tmp_path / "access.log.1"
    async with serving(access_log=str(file)) as site:
        await site.ask("GET", "/live")
        file.rename(moved)
        site.server._surface._access_log._looked_s -= 10.0
        await site.ask("GET", "/live")
        assert len(moved.read_text().splitlines()) == len(file.read_text().splitlines()) == 1


def test_a_file_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"frontend\.access_log: .*No such file or directory; give a file"):
        AccessLog(str(tmp_path / "none" / "access.log"), as_json=True)
