"""A running frontend for tests: real sockets, the openai client or raw HTTP, and a scripted dispatcher."""

import asyncio
import contextlib
import json
import math
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

import openai
import uvloop
from tokenizers import Tokenizer

from penstock.core.types.requests import FinishReason
from penstock.frontend.config import FrontendConfig
from penstock.frontend.frontend import Frontend
from penstock.frontend.http.server import FrontendServer
from penstock.frontend.limits.access import Access
from penstock.frontend.tenants.api_key import hash_of
from penstock.frontend.tenants.key_file import TenantConfig
from penstock.frontend.tenants.tenants import Tenants
from tests.support.dispatcher import Script, ScriptedDispatcher, speak
from tests.support.tokenizer import tiny_tokenizer_json

TOKENIZER = Tokenizer.from_buffer(tiny_tokenizer_json())
TEXT = "the quick brown fox jumps 你好 🎉"
IDS = TOKENIZER.encode(TEXT).ids
STOP_TOKEN = 0
TOKEN = "the-admin-token"
ADMIN = f"Authorization: Bearer {TOKEN}"
HI = [{"role": "user", "content": "hello"}]
SPEAK = speak([*IDS, STOP_TOKEN], finish=FinishReason.STOP)


class Site:
    """A running frontend with clients."""

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
        """Poll until `true` returns true; returns the seconds it took."""
        loop = asyncio.get_running_loop()
        start = loop.time()
        async with asyncio.timeout(timeout_s):
            while not true():  # noqa: ASYNC110 - the state has no event
                await asyncio.sleep(0.001)
        return loop.time() - start

    async def connect(self, **options) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port, **options)

    async def ask(self, method: str, path: str, body: bytes = b"", *headers: str) -> "Answer":
        """Send one raw request on a new connection."""
        reader, writer = await self.connect()
        writer.write(http(method, path, body, "Connection: close", *headers))
        raw = await reader.read()
        writer.close()
        return Answer(raw)


def of_keys(*keys: str) -> dict[str, TenantConfig]:
    """Make a tenant for each key, `tenant-KEY`."""
    return {f"tenant-{key}": TenantConfig(keys=(hash_of(key),)) for key in keys}


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


def bomb(size_bytes: int) -> bytes:
    """Make the beginning of a gzip file of `size_bytes` zeros, without its end."""
    packer = zlib.compressobj(wbits=31)
    first = packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)
    repeated = packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)
    return first + repeated * (size_bytes // (1 << 20) - 1)


LOOP_BLOCKED_S_MAX = 0.5
"""Longest blocking of the event loop in tests of hostile bodies, which once blocked it for seconds; a busy machine does for tenths."""


class LoopLag:
    """Measures the longest blocking of the event loop, which delays every stream."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self.longest_cpu_s = 0.0
        """Of the loop's own thread: the same on a busy machine, but for cold caches."""

    async def watch(self) -> None:
        last_s, last_cpu_s = (
            time.perf_counter(),
            time.thread_time(),
        )  # uvloop's time is constant within a turn
        while True:
            await asyncio.sleep(0)
            now_s, now_cpu_s = time.perf_counter(), time.thread_time()
            self.longest_s = max(self.longest_s, now_s - last_s)
            self.longest_cpu_s = max(self.longest_cpu_s, now_cpu_s - last_cpu_s)
            last_s, last_cpu_s = now_s, now_cpu_s


@contextlib.asynccontextmanager
async def loop_not_blocked(
    cpu_s_max: float = math.inf, blocked_s_max: float = LOOP_BLOCKED_S_MAX
) -> AsyncIterator[None]:
    """Check that the event loop is never blocked for long within the block, and computes at most so long in one turn."""
    lag = LoopLag()
    watching = asyncio.ensure_future(lag.watch())
    try:
        await asyncio.sleep(0)
        yield
        await asyncio.sleep(0)
    finally:
        watching.cancel()
    print(f"the event loop was blocked for at most {lag.longest_s * 1e3:.1f} ms")
    print(f"the event loop computed for at most {lag.longest_cpu_s * 1e3:.1f} ms")
    assert lag.longest_s < blocked_s_max
    assert lag.longest_cpu_s < cpu_s_max


@contextlib.asynccontextmanager
async def serving(
    script: Script = SPEAK,
    dispatcher: ScriptedDispatcher | None = None,
    tenants: Mapping[str, TenantConfig] | None = None,
    **config,
) -> AsyncIterator[Site]:
    dispatcher = dispatcher or ScriptedDispatcher(script)
    frontend = Frontend(
        FrontendConfig(port=0, **config),
        dispatcher,
        hash_key=bytes(16),
        access=Access(tenants=Tenants(tenants or {}, secret=bytes(16)), admin_token=TOKEN),
    )
    server = FrontendServer(frontend)
    _, port = await server.start()
    site = Site(dispatcher, frontend, server, port)
    try:
        yield site
    finally:
        await site.client.close()
        await server.close()
        assert dispatcher.open_streams == 0


def run(test: Callable[[], Awaitable[None]], *, timeout_s: float = 60.0) -> None:
    async def main() -> None:
        async with asyncio.timeout(timeout_s):
            await test()

    uvloop.run(main())
