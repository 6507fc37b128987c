"""An S3 server in a process of its own, and a proxy before it that spoils requests."""

import asyncio
import io
import queue
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web

from penstock.core.errors import Unavailable

BODY_MAX = 64 << 20
KEPT = {"etag", "content-range", "last-modified", "content-type"}
BUCKET = "bucket"
_TRIES = 600
_TRY_S = 0.05


class S3Server:
    """moto's S3 server in a process of its own, with one bucket in memory."""

    def __init__(self, python: str = sys.executable) -> None:
        """Start the server, and wait until it answers.

        Args:
            python: a Python interpreter that has moto installed.

        Raises:
            Unavailable: the server does not answer.
        """
        self._python = python
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        """Start the server again, empty."""
        command = [self._python, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(_TRIES):
            try:
                self.put(f"/{BUCKET}", b"")
            except (urllib.error.URLError, ConnectionError) as error:
                if self.process.poll() is not None:
                    raise Unavailable(
                        "the S3 server has ended; is moto installed? pip install 'moto[server]'"
                    ) from error
                time.sleep(_TRY_S)
            else:
                return
        raise Unavailable("the S3 server does not answer")

    def put(self, path: str, data: bytes) -> None:
        """Put an object, or make a bucket."""
        with urllib.request.urlopen(urllib.request.Request(self.url + path, data, method="PUT"), timeout=5):
            pass

    def kill(self) -> None:
        """Kill the server, which loses its objects."""
        self.process.kill()
        self.process.wait()


@dataclass
class Proxy:
    """Stands before the S3 server and spoils requests."""

    status: int = 0
    """Answer this to every request."""
    hang: bool = False
    """Answer nothing."""
    fail_next: int = 0
    """Answer so many requests with 503."""
    drop_next: int = 0
    """Close the connection of so many, without an answer."""
    seen: list[str] = field(default_factory=list)
    """Methods of all requests; LIST where a GET lists objects."""
    before: Callable[[str], None] = lambda _method: None
    """Called with what `seen` gets, before the request is passed on."""
    url: str = ""


def cut(request: web.Request) -> web.StreamResponse:
    """Close the connection of a request, without an answer."""
    if request.transport is not None:
        request.transport.close()
    return web.Response()


@contextmanager
def proxy_before(server: S3Server) -> Iterator[Proxy]:
    """Run a proxy in a thread of its own."""
    begun: queue.Queue[tuple[Proxy, asyncio.AbstractEventLoop, asyncio.Event]] = queue.Queue()

    async def main() -> None:
        over = asyncio.Event()
        async with proxy_of(server) as proxy:
            begun.put((proxy, asyncio.get_running_loop(), over))
            await over.wait()

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    proxy, loop, over = begun.get(timeout=30)
    try:
        yield proxy
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()


@asynccontextmanager
async def proxy_of(server: S3Server) -> AsyncIterator[Proxy]:
    proxy = Proxy()
    over = asyncio.Event()

    async def forward(request: web.Request) -> web.StreamResponse:
        proxy.seen.append("LIST" if "list-type" in request.query else request.method)
        proxy.before(proxy.seen[-1])
        if proxy.hang:
            await over.wait()
        body = await request.read()
        if proxy.fail_next:
            proxy.fail_next -= 1
            return web.Response(status=503, text="slow down")
        if proxy.status:
            return web.Response(status=proxy.status, text="planted")
        if proxy.drop_next:
            proxy.drop_next -= 1
            return cut(request)
        headers = {name: value for name, value in request.headers.items() if name.lower() != "host"}
        sent = session.request(
            request.method,
            server.url + request.path_qs,
            data=io.BytesIO(body) if body else None,
            headers=headers,
        )
        try:
            async with sent as answer:
                kept = {name: value for name, value in answer.headers.items() if name.lower() in KEPT}
                return web.Response(status=answer.status, body=await answer.read(), headers=kept)
        except aiohttp.ClientError:  # the server is dead
            return cut(request)

    app = web.Application(client_max_size=BODY_MAX)
    app.router.add_route("*", "/{path:.*}", forward)
    runner = web.AppRunner(app, shutdown_timeout=0)
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        proxy.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield proxy
        finally:
            over.set()
            await runner.cleanup()
