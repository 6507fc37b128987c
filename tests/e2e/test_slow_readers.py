"""A client that reads more slowly than tokens come gets all of them, over real sockets."""

import asyncio
import json
import socket

import pytest

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


async def begin(url):
    """Ask for a stream by a socket that takes little at once."""
    body = json.dumps(BODY).encode()
    host, port = url.removeprefix("http://").split(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, (host, int(port)))
    reader, writer = await asyncio.open_connection(sock=client, limit=1 << 20)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    return reader, writer


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


def test_a_slow_reader_is_waited_for_and_loses_nothing(deploy):
    async def parked(site):
        async with site.http.get(f"{site.url}/metrics") as response:
            lines = (await response.text()).splitlines()
        return sum(
            float(line.split()[1])
            for line in lines
            if line.startswith("penstock_router_parked_requests_total")
        )

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
