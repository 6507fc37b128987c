"""A server with one canned answer: the limit that load generator and machine set.

`python -m benchmarks.processes.canned TOKENS` prints its port and serves until its standard input ends. Each token is
an event of its own, in the shape that a chat completion has, but all of an answer is one write.
"""

import asyncio
import sys
from typing import cast

import uvloop

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_EVENT = (
    b'data: {"id":"canned","object":"chat.completion.chunk","created":0,"model":"canned","choices":[%b]}\n\n'
)
_CHOICE = b'{"index":0,"delta":{"content":" word"},"logprobs":null,"finish_reason":null}'
_USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":%d,"completion_tokens":%d}}\n\n'


def answer(num_tokens: int) -> bytes:
    """Build a whole HTTP answer of `num_tokens` events."""
    events = [_EVENT % _CHOICE] * num_tokens + [_USAGE % (1, num_tokens), b"data: [DONE]\n\n"]
    return _HEAD + b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in events) + b"0\r\n\r\n"


class Canned(asyncio.Protocol):
    """Counts bodies by their Content-Length, and answers each."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._received = b""
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)  # uvloop's is one without saying so

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end := self._received.find(b"\r\n\r\n")) >= 0:
            head = self._received[:end].lower()
            length = int(head.partition(b"content-length:")[2].split(b"\r\n", 1)[0] or 0)
            if len(self._received) < end + 4 + length:
                return
            self._received = self._received[end + 4 + length :]
            assert self._transport is not None
            self._transport.write(self._content)


async def _serve(num_tokens: int) -> None:
    loop = asyncio.get_running_loop()
    content = answer(num_tokens)
    server = await loop.create_server(lambda: Canned(content), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    server.close()


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1])))
