"""A child process's side of the socket to its supervisor."""

import asyncio
import contextlib
import socket
from collections.abc import Callable

import msgspec

from penstock.core.types.instances import Role
from penstock.deploy.messages import (
    WINDOW_S,
    Assignment,
    Beat,
    ChangeRole,
    Drain,
    News,
    Observed,
    Planned,
    ProcessFailed,
    Report,
)
from penstock.runtime.observations.windows import Window

_RECEIVE_BYTES = 65536
_news: msgspec.json.Decoder[News] = msgspec.json.Decoder(News)


class Control:
    """Sends reports and receives the supervisor's messages. One event loop owns it."""

    def __init__(self, descriptor: int) -> None:
        """Take ownership of a connected socket."""
        self.pulse: Callable[[], Beat] = Beat
        """Makes the next heartbeat."""
        self.on_process_failed: Callable[[ProcessFailed], None] = lambda _failure: None
        """Called for each failure of another process."""
        self.on_planned: Callable[[Planned], None] = lambda _planned: None
        """Called for each round of the planner."""
        self.on_change_role: Callable[[Role], None] = lambda _role: None
        """Called when the supervisor asks for a change of role."""
        self.on_drain: Callable[[float], None] = lambda _timeout_s: None
        """Called with the seconds that requests may take when the process drains."""
        self._socket = socket.socket(fileno=descriptor)
        self._socket.set_inheritable(False)
        self._received = b""

    def assignment(self) -> Assignment | None:
        """Wait for the supervisor's first message; None if the supervisor ended before sending it."""
        with self._socket.makefile("rb") as lines:
            line = lines.readline()
        return msgspec.json.decode(line, type=Assignment) if line.endswith(b"\n") else None

    def tell(self, report: Report) -> None:
        """Send a report; blocks until it is sent."""
        self._socket.sendall(msgspec.json.encode(report) + b"\n")

    async def beat(self, interval_s: float) -> None:
        """Send heartbeats for ever; drops one if the socket is full."""
        while True:
            await asyncio.sleep(interval_s)
            self._offer(self.pulse())

    async def observe(self, take: Callable[[], Window]) -> None:
        """Send a window every `WINDOW_S` for ever; drops one if the socket is full."""
        while True:
            await asyncio.sleep(WINDOW_S)
            self._offer(Observed(window=take()))

    def _offer(self, report: Report) -> None:
        """Send a report unless the socket is full; one that was sent in part is completed, so that the next one is read."""
        line = msgspec.json.encode(report) + b"\n"
        with contextlib.suppress(OSError):  # supervisor stopped (socket full), or gone: `listen` notices
            sent = self._socket.send(line, socket.MSG_DONTWAIT)
            if sent < len(line):
                self._socket.sendall(line[sent:])

    def listen(self, gone: Callable[[], None]) -> None:
        """Start receiving messages; calls `gone` when the supervisor ends."""
        asyncio.get_running_loop().add_reader(self._socket, self._hear, gone)

    def _hear(self, gone: Callable[[], None]) -> None:
        received = self._socket.recv(_RECEIVE_BYTES)
        if not received:
            gone()
            return
        *lines, self._received = (self._received + received).split(b"\n")
        for line in lines:
            match _news.decode(line):
                case ProcessFailed() as failure:
                    self.on_process_failed(failure)
                case Planned() as planned:
                    self.on_planned(planned)
                case ChangeRole(role=role):
                    self.on_change_role(role)
                case Drain(timeout_s=timeout_s):
                    self.on_drain(timeout_s)
