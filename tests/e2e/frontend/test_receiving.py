"""How requests arrive at a frontend, over real sockets: slowly, compressed, never whole, and too many at once."""

import asyncio
import gzip
import zlib

from frontend_site import Answer, Site, bomb, chat, http, serving

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
    async with serving(receive={"timeout_s": 0.2}) as site:
        reader, writer = await site.connect()
        for _ in range(2):
            raw = http("POST", PATH, chat())
            writer.write(raw[:30])
            await until_received(site, 30)
            writer.write(raw[30:])
            assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
            await site.until(lambda: site.frontend.budget.size_bytes == 0)
            await reader.readuntil(b'"cached_tokens":0}}}')
        await asyncio.sleep(0.3)
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


async def test_headers_that_never_end_count_too() -> None:
    async with serving(body_bytes_max=10_000, receive={"bytes_max": 20_000}) as site:
        lines = b"".join(b"X-%d: %s\r\n" % (n, b"x" * 1000) for n in range(8))
        connections = []
        for _ in range(4):
            reader, writer = await site.connect()
            writer.write(b"GET /live HTTP/1.1\r\nHost: test\r\n" + lines)
            connections.append((reader, writer))
        await site.until(lambda: site.frontend.budget.size_bytes > 15_000)
        assert site.frontend.budget.size_bytes <= 20_000
        assert (await site.ask("GET", "/live")).status == 200
        for _, writer in connections:
            writer.close()


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
