"""Answers probes of this host by HTTP: `/live` and `/ready`, as Kubernetes asks of each pod."""

import asyncio
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

import msgspec

from penstock.core.errors import ConfigError
from penstock.core.listening import Address

_CALLERS_MAX = 64
_REQUEST_BYTES_MAX = 8 << 10
_TIMEOUT_S = 5.0
_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 503: "Service Unavailable"}


class ProbeServer:
    """Listens for as long as its context. One event loop owns it.

    `/live` is 200 while the supervisor's event loop turns: the supervisor restarts its processes itself, so that a crashed
    worker is no reason to end the pod. `/ready` is 200 while every process of this host is ready, else 503 with what each of
    the others does.
    """

    def __init__(self, address: str, waits_for: Callable[[], Mapping[str, str]]) -> None:
        """Make a server.

        Args:
            address: `tcp://HOST:PORT`.
            waits_for: gives what each process that is not ready does, by name; empty if all are ready.
        """
        self._address = Address.parse(address, source="runtime.probes")
        self._waits_for = waits_for
        self._server: asyncio.Server | None = None
        self._callers = 0
        self.port = 0
        """Where it listens, once entered."""

    async def __aenter__(self) -> Self:
        """Listen.

        Raises:
            ConfigError: the address is taken, or none of this host.
        """
        try:
            self._server = await asyncio.start_server(
                self._answer, self._address.host, self._address.port, limit=_REQUEST_BYTES_MAX
            )
        except OSError as error:
            raise ConfigError(
                f"runtime.probes: cannot listen at {self._address}: {error.strerror or error}; choose another port"
            ) from error
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            self._server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._callers += 1
        try:
            if self._callers <= _CALLERS_MAX:
                async with asyncio.timeout(_TIMEOUT_S):
                    head = await reader.readuntil(b"\r\n\r\n")
                    writer.write(self._respond(head))
                    await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # whoever sends no whole request gets no answer
        finally:
            self._callers -= 1
            writer.close()

    def _respond(self, head: bytes) -> bytes:
        status, body = self._judge(head.split(b"\r\n", 1)[0].split(b" "))
        text = msgspec.json.encode(body)
        return (
            f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(text)}\r\nConnection: close\r\n\r\n"
        ).encode() + text

    def _judge(self, words: list[bytes]) -> tuple[int, Mapping[str, object]]:
        match words:
            case [b"GET", b"/live", _]:
                return 200, {"status": "live"}
            case [b"GET", b"/ready", _]:
                waits_for = self._waits_for()
                return (
                    (503, {"status": "unavailable", "processes": waits_for})
                    if waits_for
                    else (200, {"status": "ready"})
                )
            case [b"GET", _, _]:
                return 404, {"error": "there is only /live and /ready"}
        return 400, {"error": "expected GET /live or GET /ready"}
