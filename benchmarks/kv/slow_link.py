"""A link of limited bandwidth before a server: `python -m benchmarks.kv.slow_link PORT BYTES_PER_S` prints its own port.

All connections share the bandwidth, each direction has it to itself, as on a full-duplex link. It knows nothing of HTTP.
"""

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator

_PIECE_BYTES = 64 << 10
_OVERSLEPT_S_MAX = 0.01
"""A timer that is late is made up for by the next pieces, up to this, or the link would be slower than it says."""


class Direction:
    """One direction of a link: pieces go one after another."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at_s = 0.0

    async def copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Copy until the reader ends."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(_PIECE_BYTES):
                now_s = loop.time()
                begin_s = max(self._free_at_s, now_s - _OVERSLEPT_S_MAX)
                self._free_at_s = begin_s + len(piece) / self._bytes_per_s
                if self._free_at_s > now_s:
                    await asyncio.sleep(self._free_at_s - now_s)
                writer.write(piece)
                await writer.drain()
        writer.close()


async def serve(port: int, bytes_per_s: float) -> None:
    """Stand before a port of this machine, until cancelled."""
    up, down = Direction(bytes_per_s), Direction(bytes_per_s)

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.TaskGroup() as group:
            group.create_task(up.copy(reader, far_writer))
            group.create_task(down.copy(far_reader, writer))

    server = await asyncio.start_server(connect, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


@contextlib.contextmanager
def slow_link(port: int, bytes_per_s: float) -> Iterator[str]:
    """Run one as a process; gives its URL."""
    command = [sys.executable, "-m", "benchmarks.kv.slow_link", str(port), str(bytes_per_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), float(sys.argv[2])))
