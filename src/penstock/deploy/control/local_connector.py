"""Scales a deployment of this machine by its control channel."""

import asyncio
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from penstock.core.errors import ConfigError, Overloaded, ProtocolError, Unavailable, from_info
from penstock.core.types.instances import Role, Scale
from penstock.deploy.control.hosted import Hosted, choose, hosted
from penstock.deploy.control.messages import (
    CONTROL_VERSION,
    LINE_BYTES_MAX,
    SOCKET_NAME,
    Add,
    Apply,
    ControlAnswer,
    ControlBody,
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
)
from penstock.planner.observation import Observation

_ENTRY_S = 5.0
_PAUSE_S, _PAUSE_S_MAX = 0.02, 0.5
_PART_BYTES = 1 << 16
_ANSWER_S = 30.0
_LOOK_S = 5.0
_APPLY_S = 900.0  # the model may have to be downloaded
_FLIP_S = 900.0  # the worker drains first


class LocalConnector:
    """A `seams.ScalingConnector`; each call has a connection of its own, so a restarted supervisor is no problem.

    A call that the supervisor has no room for is repeated after a short wait. Nothing was done then.
    """

    def __init__(self, path: Path, *, entry_s: float | None = None) -> None:
        """Use the supervisor's socket at `path`; connects at each call.

        Args:
            path: the socket.
            entry_s: how long a call is repeated while too many callers are there; None is 5 s.
        """
        self.deployment: RunningDeployment | None = None
        """Who answered last."""
        self._path = path
        self._entry_s = _ENTRY_S if entry_s is None else entry_s

    async def scale(self, after: int | None = None) -> Scale:
        told = await self._ask(GetScale(after=after))
        if told.scale is None:
            raise ProtocolError(f"{self._path}: the answer has no scale; use the penstock that started it")
        return told.scale

    async def observe(self, seconds: float) -> Observation:
        """Return what was seen of demand and workers in the last `seconds`; raises as `scale`."""
        told = await self._ask(GetObservation(seconds=seconds))
        if told.observation is None:
            raise ProtocolError(
                f"{self._path}: the answer has no observation; use the penstock that started it"
            )
        return told.observation

    async def processes(self) -> tuple[ProcessView, ...]:
        """Return the deployment's processes on this host; raises as `scale`, soon where the supervisor hangs."""
        return (await self._ask(GetProcesses(), answer_s=_LOOK_S)).processes

    async def apply(self, graph_json: str, *, dry_run: bool) -> tuple[tuple[Difference, ...], RolloutView]:
        """Begin to change the deployment to another graph; returns what differs, and the rollout.

        Raises:
            RequestError: another change is under way (409), or there is no room for a new worker.
            ConfigError: the graph or its model is wrong.
            PenstockError: as `scale`.
        """
        told = await self._ask(Apply(graph_json=graph_json, dry_run=dry_run), answer_s=_APPLY_S)
        if told.rollout is None:
            raise ProtocolError(f"{self._path}: the answer has no rollout; use the penstock that started it")
        return told.differences, told.rollout

    async def rollout(self, after: int) -> RolloutView:
        """Return the last rollout once it has more lines than `after`, or has ended; raises as `scale`."""
        told = await self._ask(GetRollout(after=after))
        if told.rollout is None:
            raise ProtocolError(f"{self._path}: the answer has no rollout; use the penstock that started it")
        return told.rollout

    async def add(
        self, role: Role, count: int = 1, *, by: str, revision: int | None = None
    ) -> tuple[str, ...]:
        return (await self._ask(Add(role=role, count=count, by=by, revision=revision))).names

    async def retire(self, names: Sequence[str], *, by: str, revision: int | None = None) -> None:
        await self._ask(Retire(names=tuple(names), by=by, revision=revision))

    async def flip(self, name: str, role: Role, *, by: str, revision: int | None = None) -> None:
        await self._ask(Flip(name=name, role=role, by=by, revision=revision), answer_s=_FLIP_S)

    async def kill(self, name: str) -> None:
        """Kill a worker's process, which the supervisor starts again.

        Raises:
            RequestError: the deployment is no demonstration. The others are those of `scale`.
        """
        await self._ask(Kill(name=name))

    async def close(self) -> None:
        """Do nothing: no connection stays open."""

    async def _ask(self, body: ControlBody, *, answer_s: float = _ANSWER_S) -> ControlAnswer:
        """Send one request and return its answer; repeat it while the supervisor has no room for it.

        Raises:
            Unavailable: nobody listens at the socket, or the supervisor ended before it answered.
            Overloaded: too many callers were there all the time.
            ProtocolError: the answer is of another version.
            PenstockError: as the supervisor said.
        """
        line = msgspec.json.encode(ControlRequest(version=CONTROL_VERSION, body=body)) + b"\n"
        loop = asyncio.get_running_loop()
        give_up_s, pause_s = loop.time() + self._entry_s, _PAUSE_S
        while True:
            try:
                return self._read(await self._exchange(line, answer_s))
            except Overloaded:
                if loop.time() + pause_s >= give_up_s:
                    raise
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_S_MAX)

    async def _exchange(self, line: bytes, answer_s: float) -> bytes:
        """Send a line on a connection of its own, and return the line that answers it.

        Raises:
            Unavailable: nobody answers.
            Overloaded: the supervisor has closed the connection before it read the line, which changed nothing.
        """
        loop = asyncio.get_running_loop()
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.setblocking(False)
                connection.connect(str(self._path))  # at once: it is accepted later
                async with asyncio.timeout(answer_s):
                    await loop.sock_sendall(connection, line)
                    return await _read_line(loop, connection)
        except (BlockingIOError, BrokenPipeError, ConnectionResetError) as error:
            raise Overloaded(
                f"{self._path}: too many callers are there ({error.strerror}); end one, or try again later"
            ) from error
        except (OSError, TimeoutError) as error:
            reason = str(error) or f"no answer in {answer_s:g} s"
            raise Unavailable(f"{self._path}: no supervisor answers ({reason}); is it running?") from error

    def _read(self, answer: bytes) -> ControlAnswer:
        """Read an answer; raises as `_ask`."""
        if not answer.endswith(b"\n"):
            raise Unavailable(f"{self._path}: the supervisor ended before it answered; start it again")
        try:
            told = msgspec.json.decode(answer, type=ControlAnswer)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"{self._path}: no answer of the control channel: {error}") from error
        self.deployment = told.deployment
        if told.error is not None:
            raise from_info(told.error)
        return told


async def _read_line(loop: asyncio.AbstractEventLoop, connection: socket.socket) -> bytes:
    """Read until a line ends, the connection does, or the line is too long.

    A StreamReader would forget a refusal where the connection is reset after it.
    """
    line = bytearray()
    while not line.endswith(b"\n") and len(line) <= LINE_BYTES_MAX:
        part = await loop.sock_recv(connection, _PART_BYTES)
        if not part:
            break
        line += part
    return bytes(line)


DEFAULT_URL = "http://127.0.0.1:8000"
"""Where commands look for a server where no deployment of this user runs on this host, and `--url` names none."""
_BEGIN, _END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"


@dataclass(frozen=True, slots=True)
class FrontendAddress:
    """A frontend's URL.

    Attributes:
        url: paths are appended to it.
        name: of the deployment that was found on this host; None where `--url` names the server.
        certificate: file of the only certificate that is trusted, of a deployment of this host; None: the usual authorities.
        is_guess: whether it is the usual URL, as no deployment was found.
    """

    url: str
    name: str | None = None
    certificate: Path | None = None
    is_guess: bool = False

    def __str__(self) -> str:
        """Name it in a message."""
        if self.is_guess:
            return self.url
        return f"--url: {self.url}" if self.name is None else f"{self.name} at {self.url}"

    def tls(self) -> ssl.SSLContext:
        """Make the context of connections to it.

        A certificate of this host's own deployment is trusted for itself, whatever host name it has. Else the system's authorities
        are, or SSL_CERT_FILE, which may be the server's own certificate, whoever signed it.

        Raises:
            ConfigError: the certificate's file cannot be read.
        """
        if self.certificate is None:
            context = ssl.create_default_context()
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
            return context
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        try:
            text = self.certificate.read_text(encoding="utf-8")
            first = text[text.index(_BEGIN) : text.index(_END) + len(_END)]
            context.load_verify_locations(cadata=first)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{self}: its certificate {self.certificate} cannot be read: {error}; run as the deployment's user"
            ) from error
        return context


def base_of(url: str) -> str:
    """Give the base URL, to which paths are appended.

    Raises:
        ConfigError: `url` is no URL.
    """
    why = ""
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError as error:
        is_url, why = False, f"{error}; "
    if not is_url:
        raise ConfigError(f"--url: {url!r}: {why}expected a URL such as {DEFAULT_URL}")
    return url.rstrip("/").removesuffix("/v1")


_FLAGS = "--name, --url or --part"


async def find_deployment(
    *, name: str | None = None, url: str | None = None, part: str | None = None
) -> LocalConnector:
    """Return a connector of the only running deployment, or of the one with this name, URL and part; it has answered.

    Raises:
        Unavailable: none runs, or none fits, or it does not answer.
        Overloaded: it has no room for a caller.
        ConfigError: several fit; the text names them. Or `url` is no URL.
    """
    asked = [each for each in _living() if each.record is not None and not each.record.follows]
    if not asked:
        raise Unavailable("no deployment of this user runs on this host; start one with penstock serve")
    url = None if url is None else base_of(url)
    found = choose(asked, name=name, url=url, part=part, flags=_FLAGS)
    socket = found.directory / SOCKET_NAME
    if not socket.exists():
        raise Unavailable(f"{found.name}: has not started yet; penstock ps shows what it does")
    connector = LocalConnector(socket)
    await connector.scale()
    return connector


def find_frontend(
    url: str | None, *, name: str | None = None, part: str | None = None, flags: str = _FLAGS
) -> FrontendAddress:
    """Find the frontend that a command talks to.

    Args:
        url: what `--url` says; None is the only running deployment with frontends here, or port 8000 where there is none.
        name: the deployment's name, where several run.
        part: which part of the deployment, where several run here.
        flags: what the command has to choose by, for its user.

    Raises:
        Unavailable: no deployment fits, or it has no frontend on this host.
        ConfigError: several fit; the text names them. Or `url` is no URL.
    """
    living = _living()
    serving = [each for each in living if each.record is not None and each.record.url]
    base = None if url is None else base_of(url)
    if name is None and part is None:
        if base is not None:
            known = [each for each in serving if each.record is not None and each.record.url == base]
            return FrontendAddress(base, certificate=_certificate(known[0]) if len(known) == 1 else None)
        if not serving:
            return FrontendAddress(DEFAULT_URL, is_guess=True)
    try:
        found = choose(serving, name=name, part=part, url=base, flags=flags)
    except Unavailable:
        other = choose(living, name=name, part=part, url=base, flags=flags)
        raise Unavailable(
            f"{other.name}: no frontend of it runs on this host; name one of another host by --url"
        ) from None
    assert found.record is not None, "it has a URL"
    return FrontendAddress(found.record.url, name=found.name, certificate=_certificate(found))


def _living() -> list[Hosted]:
    return [each for each in hosted() if each.is_live]


def _certificate(found: Hosted) -> Path | None:
    return Path(found.record.certificate) if found.record is not None and found.record.certificate else None
