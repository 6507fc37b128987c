"""A running frontend for tests: real sockets, the openai client or requests by hand, and a scripted dispatcher."""

import asyncio
import contextlib
import json
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import openai
import uvloop
from tokenizers import Tokenizer

from penstock.core.types.requests import FinishReason
from penstock.frontend.config import FrontendConfig
from penstock.frontend.frontend import Frontend
from penstock.frontend.http.server import FrontendServer
from penstock.frontend.limits.access import Access
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


def bomb(size_bytes: int) -> bytes:
    """Write the beginning of a gzip file that holds as many zeros, quickly; it has no end."""
    packer = zlib.compressobj(wbits=31)
    first = packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)
    repeated = packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)
    return first + repeated * (size_bytes // (1 << 20) - 1)


LONGEST_TURN_S_MAX = 0.5
"""What tests of hostile bodies allow: such bodies kept the loop for seconds, and a busy machine keeps it for tenths."""


class Turns:
    """The longest time between two turns of the event loop; every stream waits for as long."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def watch(self) -> None:
        last_s = time.perf_counter()  # uvloop's time stands still within a turn
        while True:
            await asyncio.sleep(0)
            now_s = time.perf_counter()
            self.longest_s = max(self.longest_s, now_s - last_s)
            last_s = now_s


@contextlib.asynccontextmanager
async def no_long_turn() -> AsyncIterator[None]:
    """See that the event loop goes on all the time until the block ends."""
    turns = Turns()
    watching = asyncio.ensure_future(turns.watch())
    try:
        await asyncio.sleep(0)
        yield
        await asyncio.sleep(0)
    finally:
        watching.cancel()
    print(f"the longest turn of the loop took {turns.longest_s * 1e3:.1f} ms")
    assert turns.longest_s < LONGEST_TURN_S_MAX


@contextlib.asynccontextmanager
async def serving(
    script: Script = SPEAK,
    dispatcher: ScriptedDispatcher | None = None,
    api_keys: Sequence[str] = (),
    **config,
) -> AsyncIterator[Site]:
    dispatcher = dispatcher or ScriptedDispatcher(script)
    frontend = Frontend(
        FrontendConfig(port=0, **config),
        dispatcher,
        hash_key=bytes(16),
        access=Access(api_keys=api_keys, admin_token=TOKEN),
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


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60):
            await test()

    uvloop.run(main())
