"""Servers behind a URL and callers of the control socket that answer and ask nonsense: refused with the reason, in bounded time."""

import asyncio
import gzip
import json
import random
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer

from penstock.core.errors import PenstockError
from penstock.core.types.instances import Role
from penstock.demo import MODEL_DIR
from penstock.deploy.control.local_connector import LocalConnector
from penstock.deploy.control.messages import SOCKET_NAME, ControlAnswer, RunningDeployment
from penstock.deploy.control.server import ControlServer
from penstock.deploy.processes.watched_server import WatchedServers
from penstock.engine.openai.config import ServerConfig
from penstock.engine.openai.server import EngineServer, read_load
from penstock.engine.openai.text import TextCodec
from penstock.planner import memory_connector
from penstock.planner.memory_connector import MemoryConnector, TimedChanges
from penstock.planner.observation import ObservationStream
from penstock.router.gateway import Query
from penstock.router.routing_service import RoutingService
from penstock.runtime.observations import RequestWindow
from tests.support.control_mutations import answer_to, mutated
from tests.support.fake_server import FakeServer

TOKENIZER = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
LIMITS = {
    "health": {"interval_s": 0.05, "timeout_s": 0.5, "retry_s_max": 0.1},
    "limits": {"silence_s": 1.0, "line_bytes_max": 65536, "answer_bytes_max": 1 << 20},
    "load_interval_s": 0.05,
}
Answer = Callable[[socket.socket], None]


def whole(body: bytes, kind: str = "application/json") -> bytes:
    head = (
        f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
MODELS = whole(json.dumps({"data": [{"id": "penstock-demo", "owned_by": "vllm"}]}).encode())
BOMB = gzip.compress(bytes(50_000_000))


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def say(content: bytes, connection: socket.socket) -> None:
    connection.sendall(content)


def flood(head: bytes, piece: bytes, connection: socket.socket, *, pause_s: float = 0.0) -> None:
    """Send for ever; the other side closes the connection in the end."""
    connection.sendall(head)
    while True:
        connection.sendall(piece)
        time.sleep(pause_s)


STREAMS: dict[str, tuple[Answer, str]] = {
    "half an answer": (partial(say, HEAD + b"Content-Length: 99\r\n\r\ndata: {"), "closed within an answer"),
    "nothing": (partial(say, b""), "closed before an answer came"),
    "endless headers": (partial(flood, HEAD, b"X-A: " + b"y" * 999 + b"\r\n"), "no HTTP answer: Too many headers"),
    "an endless header": (partial(flood, HEAD + b"X-A: ", b"y" * 65536), "no HTTP answer"),
    "an endless line": (partial(flood, CHUNKED, chunk(b"data:" + b"y" * 65536)), "sent a line of more than 65536 bytes"),
    "endless comments": (partial(flood, CHUNKED, chunk(b": \n" * 20000)), "no answer within 0.5 s"),
    "endless chunks of nothing": (partial(flood, CHUNKED, chunk(b'data: {"choices":[]}\n\n' * 999)), "no answer within 0.5 s"),
    "an endless chunk header": (partial(flood, CHUNKED + b"1;", b"a" * 65536), "no answer within 0.5 s"),
    "one byte at a time": (partial(flood, HEAD + b"Content-Length: 9999\r\n\r\n", b"d", pause_s=0.05), "no answer within 0.5 s"),
    "a page": (partial(say, whole(b"<html>Welcome</html>", "text/html")), "no part of an answer: '<html>Welcome</html>'"),
    "a redirect": (
        partial(say, b"HTTP/1.1 302 Found\r\nLocation: /elsewhere\r\nContent-Length: 0\r\n\r\n"),
        "redirects to /elsewhere; redirects are not followed",
    ),
    "a compressed bomb": (
        partial(
            say,
            b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n%b" % (len(BOMB), BOMB),
        ),
        "Content-Encoding 'gzip', which was not asked for",
    ),
    "an endless refusal": (
        partial(flood, b"HTTP/1.1 500 No\r\nTransfer-Encoding: chunked\r\n\r\n", chunk(b"e" * 65536)),
        "the answer has more than 1048576 bytes",
    ),
    "deep JSON": (partial(say, whole(b"data: " + b"[" * 60_000 + b"\n\n")), "no part of an answer"),
}  # fmt: skip
"""What is answered to the trial request, and a part of the reason."""
LISTS: dict[str, tuple[Answer, str]] = {
    "a page": (partial(say, whole(b"<html></html>", "text/html")), "no list of models"),
    "a redirect to itself": (
        partial(say, b"HTTP/1.1 301 Moved\r\nLocation: /v1/models\r\nContent-Length: 0\r\n\r\n"),
        "301: redirects to /v1/models",
    ),
    "half an answer": (partial(say, HEAD + b"Content-Length: 99\r\n\r\n{"), "closed within an answer"),
    "another model": (partial(say, whole(b'{"data":[{"id":"other"}]}')), "serves 'other', expected 'penstock-demo'"),
    "a million models": (partial(say, whole(b'{"data":[' + b'{"id":"a"},' * 1_000_000 + b'{"id":"b"}]}')), "the answer has more than 1048576 bytes"),
    "deep JSON": (partial(say, whole(b'{"data":[{"id":' + b"[" * 500_000)), "no list of models"),
    "an endless list": (partial(flood, CHUNKED, chunk(b" " * 65536)), "the answer has more than 1048576 bytes"),
    "one byte at a time": (partial(flood, HEAD + b"Content-Length: 9999\r\n\r\n", b"{", pause_s=0.05), "no answer within 0.5 s"),
    "a compressed bomb": (STREAMS["a compressed bomb"][0], "which was not asked for"),
}  # fmt: skip
"""What is answered to `/v1/models`."""


class HostileServer:
    """Answers in threads of its own, with raw bytes."""

    def __init__(self, paths: dict[str, Answer]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._paths = {"/health": partial(say, whole(b"{}")), "/v1/models": partial(say, MODELS)} | paths
        self._missing: Answer = partial(say, b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            asked = b""
            while b"\r\n\r\n" not in asked:
                if not (piece := connection.recv(65536)):
                    return
                asked += piece
            self._paths.get(asked.split(b" ")[1].decode(), self._missing)(connection)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65536):
                pass

    def close(self) -> None:
        self._listener.close()


@contextmanager
def hostile(paths: dict[str, Answer]) -> Iterator[HostileServer]:
    server = HostileServer(paths)
    try:
        yield server
    finally:
        server.close()


def config_of(*urls: str) -> ServerConfig:
    return ServerConfig.parse({"url": list(urls)} | LIMITS, source="test")


def problem_of(url: str) -> str:
    """Do what `penstock serve` and `penstock router` do at the start and after failures."""

    async def main() -> str:
        server = EngineServer(url, config_of(url), ("penstock-demo",), TextCodec.open(str(MODEL_DIR)))
        try:
            async with asyncio.timeout(30):
                await server.try_out(await server.check())
        except PenstockError as error:
            return error.message
        finally:
            await server.close()
        return "it serves"

    return asyncio.run(main())


@pytest.mark.parametrize("name", STREAMS)
def test_an_answer_that_is_none_has_a_reason(name: str) -> None:
    answer, reason = STREAMS[name]
    with hostile({"/v1/completions": answer}) as server:
        problem = problem_of(server.url)
    assert reason in problem
    assert server.url in problem
    assert len(problem) < 1000
    assert problem.isprintable()


@pytest.mark.parametrize("name", LISTS)
def test_a_list_of_models_that_is_none_has_a_reason(name: str) -> None:
    answer, reason = LISTS[name]
    with hostile({"/v1/models": answer}) as server:
        problem = problem_of(server.url)
    assert reason in problem
    assert len(problem) < 1000
    assert problem.isprintable()


@pytest.mark.parametrize("name", ["a page", "an endless line"])
def test_the_router_alone_names_the_other_servers_meanwhile(name: str) -> None:
    said: list[tuple[Any, ...]] = []

    async def main() -> None:
        async with (
            asyncio.timeout(60),
            FakeServer(TOKENIZER) as good,
            RoutingService(rng=random.Random(0)) as service,
        ):
            watched = WatchedServers(
                service,
                {Role.AGGREGATED: config_of(server.url, good.url)},
                model="penstock-demo",
                model_dir=MODEL_DIR,
                say=lambda *words: said.append(words),
            )
            watching = asyncio.ensure_future(watched.run())
            try:
                while len({each[0] for each in said}) < 2:  # noqa: ASYNC110 - sockets have no event for it
                    await asyncio.sleep(0.01)
                assert {
                    service.route(Query(model="penstock-demo", prompt="x" * 99)).worker for _ in range(4)
                } == {"server-2"}
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)

    with hostile({"/v1/completions": STREAMS[name][0]}) as server:
        asyncio.run(main())
    assert [state for name, state, _ in said if name == "server-2"] == ["ready"]
    assert {state for name, state, _ in said if name == "server-1"} == {"failed"}
    assert any(STREAMS[name][1] in why for _, _, why in said)


@pytest.mark.parametrize(
    "text",
    [
        "\n" * 2_000_000,
        "vllm:num_requests_running{" + "} " * 900_000,
        "vllm:cache_config_info{" + ',num_gpu_blocks="' * 100_000 + "} 1",
        "vllm:num_requests_running " + "9" * 1_900_000,
    ],
    ids=["newlines", "braces", "labels", "digits"],
)
def test_metrics_made_to_take_long_are_not_read_in_full(text: str) -> None:
    """Where each of these characters made the reader look at all of the others, it would read for hours."""
    load = read_load(text + "\nvllm:num_requests_running 7\n")
    assert load.running in {None, 7}


MESSAGES = 2_000
CALLERS = 32
WORKERS_MAX = 64


@pytest.mark.parametrize("seed", [0])
async def test_mutated_messages_harm_nobody(seed, monkeypatch):
    monkeypatch.setattr(memory_connector, "_WAIT_S_MAX", 0.01)  # callers that wait for a change
    rng = random.Random(seed)
    messages = iter([mutated(rng) for _ in range(MESSAGES)])
    refused = answered = 0

    async def call(path):
        nonlocal refused, answered
        for message in messages:
            answer = await answer_to(path, message)
            told = msgspec.json.decode(answer, type=ControlAnswer)
            answered += 1
            refused += told.error is not None
            assert told.error is None or "failed at this request" not in told.error.message, (message, told)
            assert len(answer) < 1 << 16

    connector = MemoryConnector(
        {Role.PREFILL: 2, Role.DECODE: 2},
        workers_max=WORKERS_MAX,
        changes=TimedChanges(starts_s=0.01, drains_s=0.01, flips_s=0.01),
    )
    stream = ObservationStream()
    stream.put("frontend-1", RequestWindow(seconds=1.0, arrivals=3))
    with tempfile.TemporaryDirectory() as directory:
        me = RunningDeployment(name="fuzz", url="http://127.0.0.1:1", pid=1)
        async with ControlServer(connector, stream, Path(directory), me):
            path = Path(directory, SOCKET_NAME)
            await asyncio.gather(*(call(path) for _ in range(CALLERS)))
            scale = await LocalConnector(path).scale()
    assert 2 <= len(scale.replicas) <= WORKERS_MAX
    assert any(each.role is Role.DECODE for each in scale.replicas)
    assert answered == MESSAGES
    assert refused > MESSAGES / 2, "most are no requests"
