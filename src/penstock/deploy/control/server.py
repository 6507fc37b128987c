"""The supervisor's end of the control channel."""

import asyncio
import os
import socket
import struct
from pathlib import Path
from types import TracebackType
from typing import Self, assert_never

import msgspec

from penstock.core.errors import PenstockError, ProtocolError, RequestError
from penstock.core.log import get_logger
from penstock.deploy.control.messages import (
    CONTROL_VERSION,
    LINE_BYTES_MAX,
    SOCKET_NAME,
    Add,
    Ask,
    Deployment,
    Flip,
    GetObservation,
    GetScale,
    Retire,
    Told,
    Versioned,
)
from penstock.planner.observe.stream import ObservationStream
from penstock.seams import ScalingConnector

_CONNECTIONS_MAX = 64
_LINE_TIMEOUT_S = 10.0
_CREDENTIALS = struct.Struct("3i")
_log = get_logger()


class ControlServer:
    """Serves a connector on `DIRECTORY/control.sock`, for as long as its context. One event loop owns it.

    The directory's permissions and the kernel's word of the caller's user authenticate: only the same user and root may ask.
    """

    def __init__(
        self,
        connector: ScalingConnector,
        observations: ObservationStream,
        directory: Path,
        deployment: Deployment,
    ) -> None:
        """Make a server.

        Args:
            connector: what it serves; the caller closes it.
            observations: what it tells of demand and workers.
            directory: a private directory.
            deployment: what it tells of itself.
        """
        self._connector = connector
        self._observations = observations
        self._path = directory / SOCKET_NAME
        self._deployment = deployment
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._serve, self._path, limit=LINE_BYTES_MAX)
        self._path.chmod(0o600)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None, "entered"
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request. What a caller does wrong ends its own connection alone."""
        task = asyncio.current_task()
        assert task is not None, "started by asyncio"
        self._tasks.add(task)
        try:
            told = await self._answer(reader, writer)
            if told is not None:
                writer.write(msgspec.json.encode(told) + b"\n")
                async with asyncio.timeout(_LINE_TIMEOUT_S):
                    await writer.drain()
        except (OSError, TimeoutError, ValueError) as error:  # ValueError: the line is too long
            _log.info("control_request_dropped", error=str(error) or type(error).__name__)
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Told | None:
        """Read one line and answer it; None if it does not end."""
        if (user := _user_of(writer)) not in {os.getuid(), 0}:
            return Told(
                error=RequestError(f"user {user} may not control this deployment", http_status=403).to_info()
            )
        if len(self._tasks) > _CONNECTIONS_MAX:
            message = f"{_CONNECTIONS_MAX} callers control this deployment already; end one"
            return Told(error=RequestError(message, http_status=409).to_info())
        async with asyncio.timeout(_LINE_TIMEOUT_S):
            line = await reader.readline()
        if not line.endswith(b"\n"):
            return None
        try:
            return await self._obey(_read(line))
        except PenstockError as error:
            return Told(deployment=self._deployment, error=error.to_info())

    async def _obey(self, ask: Ask) -> Told:
        told = Told(deployment=self._deployment)
        match ask.body:
            case GetScale(after=after):
                return msgspec.structs.replace(told, scale=await self._connector.scale(after))
            case GetObservation(seconds=seconds):
                return msgspec.structs.replace(told, observation=self._observations.observe(seconds))
            case Add(role=role, count=count, by=by, revision=revision):
                names = await self._connector.add(role, count, by=by, revision=revision)
                return msgspec.structs.replace(told, names=names)
            case Retire(names=names, by=by, revision=revision):
                await self._connector.retire(names, by=by, revision=revision)
            case Flip(name=name, role=role, by=by, revision=revision):
                await self._connector.flip(name, role, by=by, revision=revision)
            case _:
                assert_never(ask.body)
        return told


def _read(line: bytes) -> Ask:
    """Read a request.

    Raises:
        ProtocolError: it is of another version, or no request.
    """
    try:
        version = msgspec.json.decode(line, type=Versioned).version
        if version != CONTROL_VERSION:
            raise ProtocolError(
                f"version: the supervisor speaks version {CONTROL_VERSION} of the control channel, got {version}; use the"
                " penstock that started it"
            )
        return msgspec.json.decode(line, type=Ask)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"no request of the control channel: {error}") from error


def _user_of(writer: asyncio.StreamWriter) -> int:
    """Give the user id of the calling process, by the kernel."""
    taken = writer.get_extra_info("socket").getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
    )
    user: int = _CREDENTIALS.unpack(taken)[1]
    return user
