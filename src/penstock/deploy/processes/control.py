"""A child process's side of the socket to its supervisor."""

import asyncio
import socket
from collections.abc import Callable

import msgspec

from penstock.core.types.instances import Role
from penstock.deploy.messages import (
    WINDOW_S,
    Assignment,
    ChangeRole,
    Drain,
    Observed,
    ProcessFailed,
    ProcessHeartbeat,
    ProcessOrder,
    Report,
    RoundCounts,
)
from penstock.runtime.observations import Window

_RECEIVE_BYTES = 65536
_UNSENT_BYTES_MAX = 1 << 20
"""More is dropped: the supervisor has read nothing for thousands of reports."""
_LAST_WORDS_S = 5.0
_news: msgspec.json.Decoder[ProcessOrder] = msgspec.json.Decoder(ProcessOrder)


class Control:
    """Sends reports and receives the supervisor's messages. One event loop owns it."""

    def __init__(self, supervisor: socket.socket) -> None:
        """Talk over a connected socket."""
        self.pulse: Callable[[], ProcessHeartbeat] = ProcessHeartbeat
        """Makes the next heartbeat."""
        self.on_process_failed: Callable[[ProcessFailed], None] = lambda _failure: None
        """Called for each failure of another process."""
        self.on_planned: Callable[[RoundCounts], None] = lambda _planned: None
        """Called for each round of the planner."""
        self.on_change_role: Callable[[Role], None] = lambda _role: None
        """Called when the supervisor asks for a change of role."""
        self.on_drain: Callable[[float], None] = lambda _timeout_s: None
        """Called with the seconds that requests may take when the process drains."""
        self._socket = supervisor
        self._socket.set_inheritable(False)
        self._received = b""
        self._unsent = bytearray()
        self._loop: asyncio.AbstractEventLoop | None = None

    def assignment(self) -> Assignment | None:
        """Wait for the supervisor's first message; None if the supervisor ended before sending it."""
        with self._socket.makefile("rb") as lines:
            line = lines.readline()
        self._socket.setblocking(False)
        return msgspec.json.decode(line, type=Assignment) if line.endswith(b"\n") else None

    def tell(self, report: Report) -> None:
        """Send a report: at once, or when the supervisor reads; after the event loop has ended, wait for that up to 5 s."""
        if len(self._unsent) < _UNSENT_BYTES_MAX:
            self._unsent += msgspec.json.encode(report) + b"\n"
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:
            self._flush(_LAST_WORDS_S)
        else:
            self._flush()

    async def beat(self, interval_s: float) -> None:
        """Send heartbeats for ever; drops one if the supervisor does not read."""
        while True:
            await asyncio.sleep(interval_s)
            self._offer(self.pulse())

    async def observe(self, take: Callable[[], Window]) -> None:
        """Send a window every `WINDOW_S` for ever; drops one if the supervisor does not read."""
        while True:
            await asyncio.sleep(WINDOW_S)
            self._offer(Observed(window=take()))

    def _offer(self, report: Report) -> None:
        """Send a report unless others wait for the supervisor to read."""
        if not self._unsent:
            self.tell(report)

    def _flush(self, wait_s: float = 0.0) -> None:
        """Send what the socket takes within `wait_s`, and the rest when it takes more. `listen` notices a supervisor that is gone."""
        self._socket.settimeout(wait_s)
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except (BlockingIOError, TimeoutError):
            pass
        except OSError:
            self._unsent.clear()
        if self._loop is not None and not self._loop.is_closed():
            if self._unsent:
                self._loop.add_writer(self._socket, self._flush)
            else:
                self._loop.remove_writer(self._socket)

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
                case RoundCounts() as planned:
                    self.on_planned(planned)
                case ChangeRole(role=role):
                    self.on_change_role(role)
                case Drain(timeout_s=timeout_s):
                    self.on_drain(timeout_s)
