"""The planner's end of its connections to hosts: each is one more `Host`, and its windows are observations."""

import asyncio
import itertools
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

import msgspec

from penstock.core.channel import FrameChannel
from penstock.core.errors import ErrorInfo, PenstockError, ProtocolError, Unavailable, from_info
from penstock.core.listening import Address
from penstock.core.log import get_logger
from penstock.core.types.instances import ReplicaState, Role, Scale, label_problem
from penstock.deploy.control.messages import Add, Flip, Retire
from penstock.deploy.hosts.connector import Hosts
from penstock.deploy.hosts.messages import (
    PROTOCOL,
    HostAdmitted,
    HostRound,
    HostState,
    HostWindow,
    Message,
    Order,
    OrderDone,
)
from penstock.deploy.messages import RoundCounts
from penstock.planner.observation import ObservationStream
from penstock.runtime.handshake import Identity
from penstock.runtime.session import ServerSession, SessionServer
from penstock.runtime.tls import PlaneTls

if TYPE_CHECKING:
    from penstock.core.channel import FrameChannel

_ANSWER_S = 30.0
_FLIP_S = 900.0  # the worker drains first
_WAIT_S_MAX = 20.0
_CLOSE_S = 0.5
_log = get_logger()


class PlannerServer:
    """Listens for hosts while its context is entered. One event loop owns it."""

    def __init__(
        self,
        address: str,
        identity: Identity,
        hosts: Hosts,
        observations: ObservationStream,
        *,
        own_name: str = "",
        tls: PlaneTls | None = None,
    ) -> None:
        """Make it; entering the context listens.

        Args:
            address: `tcp://HOST:PORT` of this host.
            identity: has the deployment's secret.
            hosts: takes those that connect.
            observations: takes their windows.
            own_name: of the planner's host, which no other one may have.
            tls: certificates; None for no TLS.
        """
        self.hosts = hosts
        self.observations = observations
        self.linked: dict[str, LinkedHost] = {}
        """Hosts that are connected, by name."""
        self._own_name = own_name
        self._lost: dict[str, LinkedHost] = {}
        self._refused = 0
        hosts.given_up = self._give_up
        self._server: SessionServer[_Session] = SessionServer(
            PROTOCOL,
            identity,
            Address.parse(address, source="planner.address"),
            lambda server: _Session(self, server),
            tls=tls,
        )

    async def __aenter__(self) -> Self:
        await self._server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._server.close("the planner's supervisor ends", _CLOSE_S)

    @property
    def address(self) -> Address:
        """Where it listens, with the actual port once entered."""
        return self._server.address

    def tell(self, planned: RoundCounts) -> None:
        """Send a round to one host with a frontend, whose metrics have it; without, it is not counted."""
        host = next((each for each in self.linked.values() if each.frontends), None)
        if host is not None:
            host.tell(self.with_refused(planned))

    def with_refused(self, planned: RoundCounts) -> RoundCounts:
        """Give a round with the connections that were refused since the last one."""
        refused, self._refused = self._refused, 0
        return msgspec.structs.replace(planned, refused_hosts=refused)

    def refused(self, host: str, peer: str, error: str) -> None:
        """Count and log a connection that is not taken."""
        self._refused += 1
        _log.warning("host_refused", host=host, peer=peer, error=error)

    def take(self, session: "_Session", state: HostState) -> "LinkedHost":
        """Take a host by its first state.

        Raises:
            PenstockError: it has no good name, or another host has it.
        """
        name = state.host
        if problem := label_problem(name, is_host=True) if name else "it has no name":
            raise ProtocolError(f"host: {problem}; set PENSTOCK_HOST")
        if name in self.linked or name == self._own_name:
            raise ProtocolError(
                f"host: {name} is connected already; if that is another machine, set PENSTOCK_HOST of one of them"
            )
        host = LinkedHost(name, session.channel, state)
        self.hosts.join(name, host, state.scale)
        self.linked[name] = host
        if (before := self._lost.pop(name, None)) is not None:
            host.labels = before.labels
        _log.info("host_joined", host=name, workers=len(state.scale.replicas))
        self.hear(host, state)
        return host

    def hear(self, host: "LinkedHost", state: HostState) -> None:
        """Take a host's state."""
        host.put(state)
        for process in host.labels.keys() - host.sources:
            self._forget(host, process)
        for process in host.ready:
            self.observations.expect(self.label(host, process))

    def label(self, host: "LinkedHost", process: str) -> str:
        """Name a source; a pod's worker has another name before it is known whose place it takes, which is then no source any more."""
        label, before = self.hosts.label(host.name, process), host.labels.get(process)
        if before not in {None, label}:
            self._forget(host, process)
        host.labels[process] = label
        return label

    def _forget(self, host: "LinkedHost", process: str) -> None:
        """Drop a source, unless another host's process has its name now."""
        label = host.labels.pop(process)
        if not any(label in other.labels.values() for other in self.linked.values()):
            self.observations.forget(label)

    def lose(self, host: "LinkedHost", reason: str, *, on_purpose: bool) -> None:
        """Note that a host's connection has ended."""
        del self.linked[host.name]
        host.end(reason)
        self._lost[host.name] = host
        if on_purpose:
            self._give_up(host.name)
        self.hosts.leave(host.name, on_purpose=on_purpose)
        _log.warning("host_left" if on_purpose else "host_lost", host=host.name, reason=reason)

    def _give_up(self, name: str) -> None:
        """Expect no more of a host that has ended."""
        if (host := self._lost.pop(name, None)) is not None:
            for process in tuple(host.labels):
                self._forget(host, process)


class LinkedHost:
    """A `Host` by its connection. A call ends with `Unavailable` when the connection does; it is never sent again."""

    def __init__(self, name: str, channel: "FrameChannel[Message]", state: HostState) -> None:
        """Take the host's first state."""
        self.name = name
        self.frontends: tuple[str, ...] = ()
        self.labels: dict[str, str] = {}
        """Names of its processes as sources of windows."""
        self._channel = channel
        self._state = state
        self._sequence = 0
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[OrderDone]] = {}
        self._changed: set[asyncio.Future[None]] = set()
        self.put(state)

    @property
    def sources(self) -> set[str]:
        """Names of its processes."""
        return {*self.frontends, *(replica.name for replica in self._state.scale.replicas)}

    @property
    def ready(self) -> tuple[str, ...]:
        """Names of its processes that should send windows."""
        workers = self._state.scale.replicas
        return (*self.frontends, *(each.name for each in workers if each.state is ReplicaState.READY))

    def put(self, state: HostState) -> None:
        """Take a newer state."""
        is_same = state.scale.sequence == self._state.scale.sequence
        self._state, self.frontends = state, state.frontends
        if not is_same:
            self._note()

    def tell(self, planned: RoundCounts) -> None:
        if self._channel.writable:
            self._channel.send(HostRound(planned=planned))

    def answer(self, done: OrderDone) -> None:
        """Take the answer to an order."""
        self._state = HostState(number=self._state.number, scale=done.scale, frontends=self.frontends)
        self._note()
        waiting = self._waiting.pop(done.number, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(done)

    def end(self, reason: str) -> None:
        """End all calls: the connection has ended."""
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(
                    Unavailable(
                        f"{self.name}: the connection ended before it answered ({reason}); look again"
                    )
                )
        self._waiting.clear()
        self._note()

    async def scale(self, after: int | None = None) -> Scale:
        if after is not None and after >= self._state.scale.sequence:
            changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._changed.add(changed)
            try:
                await asyncio.wait([changed], timeout=_WAIT_S_MAX)
            finally:
                self._changed.discard(changed)
        return self._state.scale

    async def add(
        self, role: Role, count: int = 1, *, by: str, revision: int | None = None
    ) -> tuple[str, ...]:
        return (await self._order(Add(role=role, count=count, by=by, revision=revision))).names

    async def retire(
        self,
        names: Sequence[str],
        *,
        by: str,
        revision: int | None = None,
        elsewhere: frozenset[Role] = frozenset(),
    ) -> None:
        await self._order(Retire(names=tuple(names), by=by, revision=revision), elsewhere)

    async def flip(
        self,
        name: str,
        role: Role,
        *,
        by: str,
        revision: int | None = None,
        elsewhere: frozenset[Role] = frozenset(),
    ) -> None:
        await self._order(Flip(name=name, role=role, by=by, revision=revision), elsewhere, answer_s=_FLIP_S)

    async def _order(
        self,
        change: Add | Retire | Flip,
        elsewhere: frozenset[Role] = frozenset(),
        *,
        answer_s: float = _ANSWER_S,
    ) -> OrderDone:
        if not self._channel.writable:
            raise Unavailable(f"{self.name}: does not read what it is sent; look again")
        number = next(self._numbers)
        waiting: asyncio.Future[OrderDone] = asyncio.get_running_loop().create_future()
        self._waiting[number] = waiting
        self._channel.send(
            Order(number=number, state=self._state.number, change=change, elsewhere=tuple(sorted(elsewhere)))
        )
        try:
            async with asyncio.timeout(answer_s):
                done = await waiting
        except TimeoutError as error:
            raise Unavailable(f"{self.name}: no answer in {answer_s:g} s; look again") from error
        finally:
            self._waiting.pop(number, None)
        if done.error is not None:
            raise from_info(done.error)
        return done

    def _note(self) -> None:
        for changed in self._changed:
            if not changed.done():
                changed.set_result(None)


class _Session(ServerSession[Message]):
    """One connection of a host."""

    def __init__(self, planner: PlannerServer, server: "SessionServer[_Session]") -> None:
        super().__init__(server)
        self._planner = planner
        self._host: LinkedHost | None = None

    def received(self, message: Message) -> None:
        match message:
            case HostState() if self._host is None:
                self._on_first(message)
            case HostState() if self._host is not None:
                self._planner.hear(self._host, message)
            case HostWindow(source=source, window=window) if self._host is not None:
                if source in self._host.sources:
                    self._planner.observations.put(self._planner.label(self._host, source), window)
            case OrderDone() if self._host is not None:
                self._host.answer(message)
            case _:
                raise ProtocolError(
                    f"{type(message).__name__}: a host does not send this now; update the older side"
                )

    def refused(self, process: str, error: ErrorInfo) -> None:
        self._planner.refused(process, self.channel.peer, error.message)

    def ended(self, reason: str) -> None:
        if self._host is not None:
            self._planner.lose(self._host, reason, on_purpose=self.channel.said_goodbye)

    def _on_first(self, state: HostState) -> None:
        self.admit()
        try:
            self._host = self._planner.take(self, state)
        except PenstockError as error:
            info = error.to_info()
            self.channel.send(HostAdmitted(error=info))
            self.refuse(state.host, info)
            return
        self.channel.send(HostAdmitted())
