"""A running frontend for tests: real sockets, the openai client or raw HTTP, and a scripted dispatcher."""

import asyncio
import contextlib
import json
import zlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import openai
from tokenizers import Tokenizer

from penstock.core.types.requests import FinishReason
from penstock.frontend.config import FrontendConfig
from penstock.frontend.frontend import Frontend
from penstock.frontend.http.server import FrontendServer
from penstock.frontend.limits.keys import TenantConfig, hash_of
from penstock.frontend.limits.tenants import ApiAccess, TenantKeys
from penstock.frontend.watch.overview import DeploymentSupervisor
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

    async def until(self, true: Callable[[], bool]) -> None:
        """Poll until `true` returns true; the test's own time limit is the deadline."""
        while not true():  # noqa: ASYNC110 - the state has no event
            await asyncio.sleep(0.001)

    async def connect(self, **options) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port, **options)

    async def ask(self, method: str, path: str, body: bytes = b"", *headers: str) -> "Answer":
        """Send one raw request on a new connection."""
        reader, writer = await self.connect()
        writer.write(http(method, path, body, "Connection: close", *headers))
        raw = await reader.read()
        writer.close()
        return Answer(raw)

    async def post(self, path: str, *headers: str, **fields: Any) -> "Answer":
        """Send a body as JSON, of the model `tiny` unless `fields` say another."""
        return await self.ask("POST", path, json.dumps({"model": "tiny"} | fields).encode(), *headers)

    async def metric(self, name: str) -> float:
        """Add up all metrics whose line begins with `name`."""
        lines = (await self.ask("GET", "/metrics")).body.decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


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
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        return self.json["error"]

    @property
    def events(self) -> list[dict[str, Any]]:
        """What a stream said, without its end."""
        lines = [line[6:] for line in self.body.decode().splitlines() if line.startswith("data: ")]
        return [json.loads(line) for line in lines if line != "[DONE]"]


def http(method: str, path: str, body: bytes = b"", *headers: str) -> bytes:
    host = [] if any(header.startswith("Host:") for header in headers) else ["Host: localhost"]
    lines = [f"{method} {path} HTTP/1.1", *host, *headers]
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


@contextlib.asynccontextmanager
async def serving(
    script: Script = SPEAK,
    dispatcher: ScriptedDispatcher | None = None,
    tenants: Mapping[str, TenantConfig] | None = None,
    supervisor: DeploymentSupervisor | None = None,
    **config,
) -> AsyncIterator[Site]:
    dispatcher = dispatcher or ScriptedDispatcher(script)
    frontend = Frontend(
        FrontendConfig(port=0, **config),
        dispatcher,
        hash_key=bytes(16),
        access=ApiAccess(tenants=TenantKeys(tenants or {}, secret=bytes(16)), admin_token=TOKEN),
    )
    server = FrontendServer(frontend, supervisor=supervisor)
    _, port = await server.start()
    site = Site(dispatcher, frontend, server, port)
    try:
        yield site
    finally:
        await site.client.close()
        await server.close()
        assert dispatcher.open_streams == 0
