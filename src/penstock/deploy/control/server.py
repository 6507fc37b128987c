"""The supervisor's end of the control channel."""

import asyncio
import os
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, assert_never

import msgspec

from penstock.core.errors import ConfigError, Overloaded, PenstockError, ProtocolError, RequestError
from penstock.core.listening import Address
from penstock.core.log import get_logger
from penstock.deploy.control.messages import (
    CONTROL_VERSION,
    LINE_BYTES_MAX,
    SOCKET_NAME,
    Add,
    Apply,
    ControlAnswer,
    ControlRequest,
    Difference,
    Flip,
    GetObservation,
    GetProcesses,
    GetRollout,
    GetScale,
    Kill,
    ProcessView,
    Retire,
    RolloutView,
    RunningDeployment,
    Versioned,
)
from penstock.planner.observation import ObservationStream
from penstock.seams import ScalingConnector

_CALLERS_MAX = 64
"""Requests that are obeyed at once, and callers whose request is not whole yet."""
_RETRY_AFTER_S = 0.1
_LINE_TIMEOUT_S = 10.0
_NAME_LENGTH_MAX = 64
_CREDENTIALS = struct.Struct("3i")
_log = get_logger()


class GraphApplier(Protocol):
    """Changes a deployment to another graph."""

    async def apply(self, graph_json: str, *, dry_run: bool) -> tuple[Difference, ...]: ...
    async def watch(self, after: int) -> RolloutView: ...


class ControlServer:
    """Serves a connector on `DIRECTORY/control.sock`, for as long as its context. One event loop owns it.

    The directory's permissions and the kernel's word of the caller's user authenticate: only the same user and root may ask.

    Callers that send no whole request keep nobody out: where there are too many of them, the one that came first is refused. A
    request beyond those that may be obeyed at once is read, and refused with a reason.
    """

    def __init__(
        self,
        connector: ScalingConnector,
        observations: ObservationStream,
        directory: Path,
        deployment: RunningDeployment,
        *,
        applier: GraphApplier | None = None,
        processes: Callable[[], tuple[ProcessView, ...]] = tuple,
        kill: Callable[[str], None] | None = None,
    ) -> None:
        """Make a server.

        Args:
            connector: what it serves; the caller closes it.
            observations: what it tells of demand and workers.
            directory: a private directory.
            deployment: what it tells of itself.
            applier: changes it to another graph; None: nobody may.
            processes: describes its processes.
            kill: kills a worker's process by name; None: nobody may.
        """
        self._connector = connector
        self._observations = observations
        self._path = directory / SOCKET_NAME
        self._deployment = deployment
        self._applier = applier
        self._processes = processes
        self._kill = kill
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._reading: dict[asyncio.Task[None], asyncio.Timeout] = {}
        """Callers whose request is not whole yet, the first one first."""
        self._obeyed = 0

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
            with ExitStack() as held:
                line = await self._answer(reader, writer, held)
                if line is not None:
                    writer.write(line)
                    async with asyncio.timeout(_LINE_TIMEOUT_S):
                        await writer.drain()
        except (OSError, TimeoutError) as error:
            _log.info("control_request_dropped", error=str(error) or type(error).__name__)
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, held: ExitStack
    ) -> bytes | None:
        """Read one line and answer it in one; None if it does not end. The caller counts as obeyed until `held` is left."""
        if (user := _user_of(writer)) not in {os.getuid(), 0}:
            refused = RequestError(f"user {user} may not control this deployment", http_status=403)
            return msgspec.json.encode(ControlAnswer(error=refused.to_info())) + b"\n"
        try:
            line = await self._read_line(reader)
            if not line.endswith(b"\n"):
                return None
            held.enter_context(self._place())
            return msgspec.json.encode(await self._obey(_read(line))) + b"\n"
        except PenstockError as error:
            info = error.to_info()
        except (OSError, TimeoutError):
            raise
        except Exception as error:  # noqa: BLE001 - the caller learns of it, and others are served
            _log.error("control_request_failed", error=repr(error))
            info = PenstockError(f"the supervisor failed at this request: {error!r}").to_info()
        return msgspec.json.encode(ControlAnswer(deployment=self._deployment, error=info)) + b"\n"

    @contextmanager
    def _place(self) -> Iterator[None]:
        """Take one of the places of callers that are obeyed, until the context is left; raises Overloaded where all are taken."""
        if self._obeyed >= _CALLERS_MAX:
            raise _full(f"{_CALLERS_MAX} callers control this deployment already; end one")
        self._obeyed += 1
        try:
            yield
        finally:
            self._obeyed -= 1

    async def _read_line(self, reader: asyncio.StreamReader) -> bytes:
        """Read one line, or what came before the caller's end. Where too many callers have sent none, the first of them is refused.

        Raises:
            ProtocolError: it is too long.
            Overloaded: others came meanwhile, and it is not whole.
            TimeoutError: it was not whole in time.
        """
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None, "started by asyncio"
        try:
            async with asyncio.timeout(_LINE_TIMEOUT_S) as timeout:
                self._reading[task] = timeout
                if len(self._reading) > _CALLERS_MAX:
                    first = self._reading.pop(next(iter(self._reading)))
                    if not first.expired():
                        first.reschedule(loop.time())
                return await reader.readline()
        except ValueError as error:
            raise ProtocolError(
                f"a request of the control channel has at most {LINE_BYTES_MAX} bytes, and this line is longer"
            ) from error
        except TimeoutError as error:
            if task in self._reading:
                raise
            raise _full(
                f"{_CALLERS_MAX} callers came after this one, whose request was not whole; send it again"
            ) from error
        finally:
            self._reading.pop(task, None)

    async def _obey(self, ask: ControlRequest) -> ControlAnswer:
        if isinstance(ask.body, GetScale | GetObservation | GetProcesses | GetRollout):
            return await self._look(ask.body)
        return await self._change(ask.body)

    async def _look(self, body: GetScale | GetObservation | GetProcesses | GetRollout) -> ControlAnswer:
        told = ControlAnswer(deployment=self._deployment)
        match body:
            case GetScale(after=after):
                return msgspec.structs.replace(told, scale=await self._connector.scale(after))
            case GetObservation(seconds=seconds):
                if not seconds > 0:
                    raise RequestError(f"seconds: must be > 0, got {seconds:g}")
                return msgspec.structs.replace(told, observation=self._observations.observe(seconds))
            case GetProcesses():
                return msgspec.structs.replace(told, processes=self._processes())
            case GetRollout(after=after):
                return msgspec.structs.replace(told, rollout=await self._own_applier().watch(after))
            case _:
                assert_never(body)

    async def _change(self, body: Apply | Add | Retire | Flip | Kill) -> ControlAnswer:
        if isinstance(body, Add | Retire | Flip):
            _check_name(body.by)
        told = ControlAnswer(deployment=self._deployment)
        match body:
            case Apply(graph_json=graph_json, dry_run=dry_run):
                applier = self._own_applier()
                found = await applier.apply(graph_json, dry_run=dry_run)
                return msgspec.structs.replace(told, differences=found, rollout=await applier.watch(-1))
            case Add(role=role, count=count, by=by, revision=revision):
                names = await self._connector.add(role, count, by=by, revision=revision)
                return msgspec.structs.replace(told, names=names)
            case Retire(names=names, by=by, revision=revision):
                await self._connector.retire(names, by=by, revision=revision)
            case Flip(name=name, role=role, by=by, revision=revision):
                await self._connector.flip(name, role, by=by, revision=revision)
            case Kill(name=name):
                if self._kill is None:
                    raise RequestError(
                        "this deployment kills no workers on demand (frontend.page.kills_workers)",
                        http_status=403,
                    )
                self._kill(name)
            case _:
                assert_never(body)
        return told

    def _own_applier(self) -> GraphApplier:
        if self._applier is None:
            raise RequestError("this deployment takes no other graph", http_status=403)
        return self._applier


def _read(line: bytes) -> ControlRequest:
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
        return msgspec.json.decode(line, type=ControlRequest)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(f"no request of the control channel: {error}") from error


def _full(message: str) -> Overloaded:
    return Overloaded(message, retry_after_s=_RETRY_AFTER_S)


def _check_name(by: str) -> None:
    """Check the name of who scales, which logs and other callers are told; raises RequestError."""
    if not 1 <= len(by) <= _NAME_LENGTH_MAX or not by.isprintable():
        raise RequestError(
            f"by: must have 1 to {_NAME_LENGTH_MAX} printable characters, got {by[:_NAME_LENGTH_MAX]!r} of {len(by)}"
        )


def _user_of(writer: asyncio.StreamWriter) -> int:
    """Give the user id of the calling process, by the kernel."""
    taken = writer.get_extra_info("socket").getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
    )
    user: int = _CREDENTIALS.unpack(taken)[1]
    return user


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
