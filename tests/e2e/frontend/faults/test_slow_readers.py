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
    "max_tokens": 4000,
    "seed": 7,
    "stream": True,
    "logprobs": True,
    "top_logprobs": 20,
    "ignore_eos": True,
}
PACE_BYTES_PER_S = 77_000
LONG_TOKENS = 8000
LONG = BODY | {"max_tokens": LONG_TOKENS, "top_logprobs": 5}


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


def test_a_slow_reader_is_waited_for_and_loses_nothing(deploy):
    async def scenario(site):
        reader, writer = await begin(site.url)

        async def is_parked():
            return (await site.load("worker-1"))["running_requests"] == 0

        await asyncio.sleep(0.5)
        await site.until(is_parked, timeout_s=30)
        assert (await site.load("worker-1"))["active_blocks"] == 0, "its engine does without it"
        slow = await tokens_of(reader)
        assert len(slow) == BODY["max_tokens"]
        assert await parked(site) > 0
        writer.close()
        reader, writer = await begin(site.url)
        assert await tokens_of(reader) == slow, "as who reads at once"
        writer.close()

    plane = {"stream_bytes_max": 65536, "window_tokens": 64}
    mock = {"timing": {"step_s": 0.0005}}
    deploy(
        scenario, role={"mock": mock}, request_plane=plane, frontend={"port": 0, "write_buffer_bytes": 4096}
    )


def test_a_reader_at_77_kb_a_second_gets_all_of_8000_tokens(deploy, tmp_path):
    model = tmp_path / "penstock-demo"
    shutil.copytree(MODEL_DIR, model, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2 * LONG_TOKENS}))

    async def scenario(site):
        loop = asyncio.get_running_loop()
        expected = await read_at_pace(site.url, LONG, 1e9)
        assert await parked(site) == 0
        began_s = loop.time()
        slow = await read_at_pace(site.url, LONG, PACE_BYTES_PER_S)
        took_s = loop.time() - began_s
        tokens = await tokens_of(reader_of(slow))
        assert len(tokens) == LONG_TOKENS
        assert tokens == await tokens_of(reader_of(expected))
        assert await parked(site) > 0, "its engine did without it"
        print(f"{len(slow)} bytes in {took_s:.1f} s")
        assert took_s < 1.2 * len(slow) / PACE_BYTES_PER_S + 1, "it waits for its own reading alone"

    mock = {"timing": {"step_s": 0.0005}}
    deploy(scenario, model=str(model), role={"mock": mock}, timeout_s=150)
