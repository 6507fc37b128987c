"""Images by URL: only from the hosts that are allowed, within size and time, without redirects."""

import asyncio
import gzip
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from penstock.core.errors import RequestError
from penstock.frontend.apis.bodies import MediaPart
from penstock.frontend.config import MediaFetchConfig
from penstock.frontend.media import MediaFetcher


async def answer(request: web.Request) -> web.StreamResponse:
    match request.path:
        case "/good.png":
            return web.Response(body=b"picture" * 100)
        case "/large.png":
            return web.Response(body=bytes(5000))
        case "/endless.png":
            response = web.StreamResponse()
            await response.prepare(request)
            while True:
                await response.write(bytes(1000))
        case "/slow.png":
            await asyncio.sleep(60)
        case "/moved.png":
            raise web.HTTPFound("/good.png")
        case "/packed.png":
            assert request.headers["Accept-Encoding"] == "identity"
            return web.Response(body=gzip.compress(bytes(1000)), headers={"Content-Encoding": "gzip"})
        case "/empty.png":
            return web.Response()
    raise web.HTTPNotFound


@asynccontextmanager
async def server() -> AsyncIterator[int]:
    app = web.Application()
    app.router.add_get("/{name}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


def fetch(name: str, **config: object) -> bytes:
    async def main() -> bytes:
        settings = {"private_addresses": True, "bytes_max": 2000, "timeout_s": 60.0}
        async with server() as port:
            settings["hosts"] = (f"127.0.0.1:{port}", f"localhost:{port}", "127.0.0.1:1")
            fetcher = MediaFetcher(MediaFetchConfig(**settings | config))
            try:
                part = MediaPart(
                    modality="image", param="messages[0].content[0].image_url", url=name.format(port=port)
                )
                return await fetcher.fetch(part)
            finally:
                await fetcher.close()

    return asyncio.run(main())


def test_a_file_of_an_allowed_host_comes_whole() -> None:
    assert fetch("http://127.0.0.1:{port}/good.png") == b"picture" * 100
    assert fetch("http://LocalHost:{port}/good.png") == b"picture" * 100


@pytest.mark.parametrize(
    ("url", "config", "status", "says"),
    [
        ("http://127.0.0.1:{port}/good.png", {"hosts": ()}, 400, "does not fetch from '127.0.0.1:"),
        ("http://127.0.0.1:{port}/good.png", {"hosts": ("127.0.0.1",)}, 400, "does not fetch from '127.0.0.1:"),
        ("https://127.0.0.1/good.png", {}, 400, "does not fetch from '127.0.0.1';"),
        ("http://127.0.0.1:{port}/good.png", {"private_addresses": False}, 400, "no public address"),
        ("http://localhost:{port}/good.png", {"private_addresses": False}, 400, "no public address"),
        ("http://localhost@evil.example:{port}/good.png", {}, 400, "does not fetch from 'evil.example:"),
        ("http://127.0.0.1:{port}/large.png", {}, 413, "larger than 2000 bytes"),
        ("http://127.0.0.1:{port}/endless.png", {}, 413, "larger than 2000 bytes"),
        ("http://127.0.0.1:{port}/slow.png", {"timeout_s": 0.5}, 400, "took longer than 0.5 s"),
        ("http://127.0.0.1:{port}/moved.png", {}, 400, "answered 302; redirects are not followed"),
        ("http://127.0.0.1:{port}/none.png", {}, 400, "answered 404"),
        ("http://127.0.0.1:{port}/empty.png", {}, 400, "sent no bytes"),
        ("http://127.0.0.1:{port}/packed.png", {}, 400, "sent it compressed ('gzip')"),
        ("http://127.0.0.1:1/good.png", {}, 400, "could not be fetched: 127.0.0.1:1"),
    ],
)  # fmt: skip
def test_anything_else_is_refused(url: str, config: dict[str, object], status: int, says: str) -> None:
    with pytest.raises(RequestError) as refused:
        fetch(url, **config)
    assert says in refused.value.message
    assert refused.value.http_status == status
    assert "\n" not in refused.value.message
