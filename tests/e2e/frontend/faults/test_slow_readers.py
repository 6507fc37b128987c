"""Clients that read more slowly than tokens come get all of them, over real sockets."""

import asyncio
import json
import shutil
import socket

import pytest

from penstock.demo import MODEL_DIR

pytestmark = pytest.mark.slow

BODY = {
    "model": "penstock-demo",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 1500,
    "seed": 7,
    "stream": True,
    "logprobs": True,
    "top_logprobs": 20,
    "ignore_eos": True,
}


async def connect(url, receive_bytes):
    """Connect a socket that takes little at once; the kernel heeds the size only before it connects."""
    host, port = url.removeprefix("http://").split(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, (host, int(port)))
    return client


def request_of(asked):
    """Word a request after whose answer the server closes: a refusal must not look like a stream that stands still."""
    body = json.dumps(asked).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def begin(url):
    """Ask for a stream by a socket that takes little at once."""
    reader, writer = await asyncio.open_connection(sock=await connect(url, 65536), limit=1 << 20)
    writer.write(request_of(BODY))
    return reader, writer


async def read_at_pace(url, asked, bytes_per_s):
    """Ask and read an answer to its end, 4 KiB at a time and never ahead of the pace; give what came."""
    loop = asyncio.get_running_loop()
    came = bytearray()
    with await connect(url, 4096) as client:
        await loop.sock_sendall(client, request_of(asked))
        began_s = loop.time()
        while part := await loop.sock_recv(client, 4096):
            came += part
            await asyncio.sleep(began_s + len(came) / bytes_per_s - loop.time())
    return bytes(came)


def reader_of(came):
    reader = asyncio.StreamReader(limit=1 << 20)
    reader.feed_data(came)
    reader.feed_eof()
    return reader


async def tokens_of(reader):
    """Read a stream to its end; give the tokens' texts, of which each has log-probabilities."""
    tokens = []
    while (line := await reader.readline()) != b"data: [DONE]\n":
        assert line, "cut off"
        if line.startswith(b"data: "):
            chunk = json.loads(line[6:])
            assert "error" not in chunk, chunk
            for choice in chunk["choices"]:
                tokens += [entry["token"] for entry in (choice.get("logprobs") or {}).get("content", ())]
    return tokens


async def parked(site):
    async with site.http.get(f"{site.url}/metrics") as response:
        lines = (await response.text()).splitlines()
    return sum(
        float(line.split()[1]) for line in lines if line.startswith("penstock_router_parked_requests_total")
    )


ROLE = {"mock": {"timing": {"step_s": 0.0005}}}


def test_a_slow_reader_is_waited_for_and_loses_nothing(deploy):
    async def scenario(site):
        reader, writer = await begin(site.url)
        came, stops = b"", 0

        async def is_parked():
            load = await site.load("worker-1")
            return await parked(site) > stops and load["running_requests"] == 0

        while stops < 3:
            await site.until(is_parked)
            assert (await site.load("worker-1"))["active_blocks"] == 0, "its engine does without it"
            stops = await parked(site)
            came += await reader.readexactly(400_000)
        slow = await tokens_of(reader_of(came + await reader.read()))
        assert len(slow) == BODY["max_tokens"]
        writer.close()
        reader, writer = await begin(site.url)
        assert await tokens_of(reader) == slow, "as who reads at once"
        writer.close()

    plane = {"stream_bytes_max": 65536, "window_tokens": 64}
    frontend = {"port": 0, "write_buffer_bytes": 4096}
    deploy(scenario, role=ROLE, request_plane=plane, frontend=frontend, timeout_s=120)


@pytest.mark.nightly
def test_a_reader_at_77_kb_a_second_gets_all_of_8000_tokens(deploy, tmp_path):
    model = tmp_path / "penstock-demo"
    shutil.copytree(MODEL_DIR, model, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16_000}))
    asked = BODY | {"max_tokens": 8000, "top_logprobs": 5}

    async def scenario(site):
        expected = await read_at_pace(site.url, asked, 1e9)
        before = await parked(site)
        slow = await tokens_of(reader_of(await read_at_pace(site.url, asked, 77_000)))
        assert len(slow) == 8000
        assert slow == await tokens_of(reader_of(expected))
        assert await parked(site) > before, "its engine did without it"

    deploy(scenario, model=str(model), role=ROLE, timeout_s=240)
