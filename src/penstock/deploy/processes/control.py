"""A child process's end of the socket to its supervisor."""

import asyncio
import contextlib
import socket
from collections.abc import Callable

import msgspec

from penstock.deploy.messages import Assignment, Beat, ProcessFailed, Report

_RECEIVE_BYTES = 65536
_news: msgspec.json.Decoder[ProcessFailed] = msgspec.json.Decoder(ProcessFailed)


class Control:
    """Says how it goes, and hears what the supervisor has to say. One event loop owns it."""

    def __init__(self, descriptor: int) -> None:
        """Take over a connected socket."""
        self.pulse: Callable[[], Beat] = Beat
        """Says how far this process is, for a heartbeat."""
        self.on_news: Callable[[ProcessFailed], None] = lambda _news: None
        """Hears of processes of the deployment that failed."""
        self._socket = socket.socket(fileno=descriptor)
        self._socket.set_inheritable(False)
        self._received = b""

    def assignment(self) -> Assignment | None:
        """Wait for the supervisor's first line; None if it was gone before it said what to do."""
        with self._socket.makefile("rb") as lines:
            line = lines.readline()
        return msgspec.json.decode(line, type=Assignment) if line.endswith(b"\n") else None

    def tell(self, report: Report) -> None:
        """Say something that must be heard."""
        self._socket.sendall(msgspec.json.encode(report) + b"\n")

    async def beat(self, interval_s: float) -> None:
        """Say again and again that this process's loop runs; a supervisor that does not listen holds nothing up."""
        while True:
            await asyncio.sleep(interval_s)
            line = msgspec.json.encode(self.pulse()) + b"\n"
            with contextlib.suppress(
                OSError
            ):  # it is stopped, and the socket is full; or gone, which `listen` notices
                self._socket.send(line, socket.MSG_DONTWAIT)

    def listen(self, gone: Callable[[], None]) -> None:
        """Hear the supervisor from now on; `gone` is called when it is."""
        asyncio.get_running_loop().add_reader(self._socket, self._hear, gone)

    def _hear(self, gone: Callable[[], None]) -> None:
        received = self._socket.recv(_RECEIVE_BYTES)
        if not received:
            gone()
            return
        *lines, self._received = (self._received + received).split(b"\n")
        for line in lines:
            self.on_news(_news.decode(line))
