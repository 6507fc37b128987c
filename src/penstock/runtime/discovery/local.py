"""Discovery through the hub of this machine's supervisor.

The hub may restart at any time. Clients then register again by themselves, and watchers keep the instances they know. An
instance that has not registered with the restarted hub after one lease time counts as gone.
"""

import asyncio
import random
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from penstock.core.errors import (
    ConfigError,
    ErrorInfo,
    Overloaded,
    PenstockError,
    ProtocolError,
    Unavailable,
    from_info,
)
from penstock.core.framing import Challenge, FrameCodec, Goodbye, Ping, Pong
from penstock.core.ids import WorkerId
from penstock.core.listening import Address
from penstock.core.log import get_logger
from penstock.core.types.instances import Instance, InstanceChange, InstancePut, InstanceRemoved, WatchSynced
from penstock.core.wire import Wire
from penstock.runtime.config import DiscoveryConfig
from penstock.runtime.discovery.registrations import RegistryMetrics
from penstock.runtime.discovery.view import InstanceTable, TableCursor
from penstock.runtime.handshake import Hello, HelloReply, Identity
from penstock.runtime.session import ClientSession, ServerSession, SessionProtocol, SessionServer
from penstock.runtime.tls import PlaneTls


class Welcome(Wire, frozen=True, tag="welcome"):
    """The hub's first message to an accepted client; a restarted hub has another `hub_id`."""

    hub_id: str
    lease_ttl_s: float


class Register(Wire, frozen=True, tag="register"):
    """Register or update an instance; `Registered` answers."""

    instance: Instance


class Registered(Wire, frozen=True, tag="registered"):
    worker_id: WorkerId
    error: ErrorInfo | None = None


class Renew(Wire, frozen=True, tag="renew"):
    """Renew these leases for another `lease_ttl_s`; `Lapsed` lists those that have expired already."""

    worker_ids: tuple[WorkerId, ...]


class Lapsed(Wire, frozen=True, tag="lapsed"):
    worker_ids: tuple[WorkerId, ...]


class Withdraw(Wire, frozen=True, tag="withdraw"):
    worker_id: WorkerId


class Watch(Wire, frozen=True, tag="watch"):
    """Subscribe: the hub sends all present instances, then `WatchSynced`, then every change."""


class Change(Wire, frozen=True, tag="change"):
    change: InstanceChange


class Refusals(Wire, frozen=True, tag="refusals"):
    """Sent to clients that watch: `count` clients were refused since the hub's start, for another secret, hash key or release."""

    count: int


HubMessage = (
    Challenge | Hello | HelloReply | Welcome | Register | Registered | Renew | Lapsed | Withdraw | Watch | Change
    | Refusals | Ping | Pong | Goodbye
)  # fmt: skip

CODEC: FrameCodec[HubMessage] = FrameCodec(HubMessage)


def hub_protocol(config: DiscoveryConfig) -> SessionProtocol[HubMessage]:
    return SessionProtocol(
        codec=CODEC,
        server="hub",
        client="client",
        frame_bytes_max=config.frame_bytes_max,
        write_bytes_max=config.frame_bytes_max,
        heartbeat_interval_s=config.lease_ttl_s / 3,
        heartbeat_timeout_s=config.lease_ttl_s,
        connect_timeout_s=config.connect_timeout_s,
        connections_max=config.connections_max,
    )


_SILENT = "it may want TLS (runtime.tls), refuse this host's certificate, or hang; see its log"
"""What may be wrong with a hub that takes a connection and does not even send its challenge."""
_log = get_logger()


class LocalDiscovery:
    """A client of the hub at `address`; it connects when entered, and reconnects by itself.

        async with LocalDiscovery(address, identity, rng=rng) as discovery:
            registration = await discovery.register(instance)

    One event loop owns it.
    """

    def __init__(
        self,
        address: str,
        identity: Identity,
        *,
        rng: random.Random,
        tls: PlaneTls | None = None,
        config: DiscoveryConfig | None = None,
        metrics: RegistryMetrics | None = None,
    ) -> None:
        """Make a client; entering the context connects it.

        Args:
            address: the hub's address.
            identity: has the deployment's secret.
            rng: for jitter.
            tls: certificates for TCP; None for no TLS.
            config: bounds and times.
            metrics: of this client; None for none.
        """
        self._address = Address.parse(address, source="hub")
        self._identity = identity
        self._rng = rng
        self._tls = tls
        self._metrics = metrics or RegistryMetrics(None)
        self._config = config or DiscoveryConfig()
        self._table = InstanceTable(watchers_max=self._config.connections_max)
        self._registrations: dict[WorkerId, LocalRegistration] = {}
        self._session: _Session | None = None
        self._latest: _Session | None = None  # also one that the hub has not accepted
        self._connected = asyncio.Event()
        self._last_error = "it does not answer"
        self._refusal: ProtocolError | None = None  # of the last try to connect
        self._answered = asyncio.Event()  # set when the hub has accepted or refused this client
        self._watching = False
        self._hub_id = ""  # hub of the last sync
        self._absent: set[WorkerId] = set()  # known, but not registered with the restarted hub yet
        self._grace: asyncio.TimerHandle | None = None
        self._closed = False
        self._tasks = asyncio.TaskGroup()
        self._keeper: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self._keeper = self._tasks.create_task(self._keep_connected(), name="hub connection")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
        await self._tasks.__aexit__(None, None, None)  # an error of the body propagates unchanged

    @property
    def connected(self) -> bool:
        return self._session is not None

    async def connect(self) -> None:
        """Wait until the hub has accepted this client.

        Raises:
            Unavailable: it refuses this client, or has not answered within `connect_timeout_s`; the text says why.
        """
        try:
            async with asyncio.timeout(self._config.connect_timeout_s):
                await self._answered.wait()
                if self._refusal is not None:
                    raise Unavailable(f"hub at {self._address}: {self._refusal.message}")
                await self._connected.wait()
        except TimeoutError as error:
            raise self._unavailable() from error

    async def register(self, instance: Instance) -> "LocalRegistration":
        registration = LocalRegistration(self, instance)
        self._registrations[instance.worker_id] = registration
        registration.send()
        try:
            async with asyncio.timeout(self._config.connect_timeout_s):
                await registration.accepted
        except (TimeoutError, PenstockError) as error:
            await registration.close()
            if isinstance(error, PenstockError):
                raise
            raise self._unavailable() from error
        return registration

    def _unavailable(self) -> Unavailable:
        why = self._last_error
        if self._latest is not None and self._latest.channel.is_open and self._latest.is_silent:
            why = f"it takes connections and says nothing: {_SILENT}"
        ask = "" if "certificate" in why else ": is the supervisor running?"
        return Unavailable(
            f"hub at {self._address}: {why}; waited {self._config.connect_timeout_s:g} s (connect_timeout_s){ask}"
        )

    def watch(self) -> AsyncIterator[InstanceChange]:
        if not self._watching:
            self._watching = True
            if self._session is not None:
                self._session.watch()
        return self._table.watch()

    async def close(self) -> None:
        """Close the connection, which withdraws all registrations, and end every watch. Safe twice."""
        if self._closed:
            return
        self._closed = True
        self._table.close()
        if self._grace is not None:
            self._grace.cancel()
        if self._session is not None:
            await self._session.close_gracefully("the client closes", self._config.connect_timeout_s)
        if self._keeper is not None:
            self._keeper.cancel()

    async def _keep_connected(self) -> None:
        tries = 0
        while True:
            try:
                await self._connect_once()
                tries = 0
            except (OSError, TimeoutError, PenstockError) as error:
                self._last_error = str(error) or self._last_error
                self._refusal = error if isinstance(error, ProtocolError) else None
                if self._refusal is not None:
                    self._answered.set()
                if tries == 0:
                    _log.warning("hub_unreachable", address=str(self._address), error=self._last_error)
            await asyncio.sleep(self._config.retry_delay_s(tries, self._rng))
            tries += 1

    async def _connect_once(self) -> None:
        """Connect, and wait until the connection ends.

        Raises:
            OSError, TimeoutError: the hub does not answer.
            PenstockError: the hub refuses this client.
        """
        session = self._latest = _Session(self, self._identity, self._config)
        try:
            await session.connect(self._address, self._tls)
            welcome = session.welcome
            _log.info("hub_connected", address=str(self._address), hub_id=welcome.hub_id)
            self._session = session
            self._refusal = None
            self._answered.set()
            self._connected.set()
            self._metrics.connected.set(1)
            session.begin(tuple(self._registrations.values()), watch=self._watching)
            await session.channel.closed.wait()
            if not self._closed:
                self._metrics.losses.inc()
                _log.warning("hub_lost", address=str(self._address), known_instances=len(self._table))
        finally:
            self._session = None
            self._connected.clear()
            self._metrics.connected.set(0)
            session.channel.abort("not needed any more")

    def _on_change(self, change: InstanceChange) -> None:
        match change:
            case InstancePut(instance=instance):
                self._absent.discard(instance.worker_id)
                self._table.put(instance)
            case InstanceRemoved(worker_id=worker_id, reason=reason):
                self._absent.discard(worker_id)
                self._table.remove(worker_id, reason)
            case WatchSynced():
                pass

    def _on_synced(self, hub_id: str, present: set[WorkerId], lease_ttl_s: float) -> None:
        """Handle known instances that the hub did not report.

        If the hub is the same as before, they are gone. If it has restarted, they have `lease_ttl_s` to register again.
        """
        absent = {worker_id for worker_id in self._table if worker_id not in present}
        if hub_id != self._hub_id:
            self._hub_id = hub_id
            self._absent = absent
            if self._grace is not None:
                self._grace.cancel()
            self._grace = asyncio.get_running_loop().call_later(lease_ttl_s, self._end_grace)
        else:
            for worker_id in absent - self._absent:
                self._table.remove(worker_id, "it left while the hub was out of reach")
        self._table.mark_synced()

    def _end_grace(self) -> None:
        absent, self._absent = self._absent, set()
        if self._session is not None:  # else the next sync decides
            for worker_id in absent:
                self._table.remove(worker_id, "it did not register again with the restarted hub")


class LocalRegistration:
    """One worker's registration with the hub, repeated after every reconnect."""

    def __init__(self, discovery: LocalDiscovery, instance: Instance) -> None:
        self.instance = instance
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Resolved by the hub's first answer."""
        self._discovery = discovery

    def send(self) -> None:
        """Register the instance if the hub is connected; else this happens on the next connection."""
        session = self._discovery._session
        if session is not None:
            session.channel.send(Register(instance=self.instance))

    def answered(self, answer: Registered) -> None:
        if answer.error is not None:
            _log.warning("registration_refused", worker=self.instance.name, error=answer.error.message)
        if self.accepted.done():
            return
        if answer.error is not None:
            self.accepted.set_exception(from_info(answer.error))
        else:
            self.accepted.set_result(None)

    async def update(self, instance: Instance) -> None:
        self.instance = instance
        if self._discovery._registrations.get(instance.worker_id) is self:
            self.send()

    async def close(self) -> None:
        worker_id = self.instance.worker_id
        if self._discovery._registrations.get(worker_id) is self:
            del self._discovery._registrations[worker_id]
            if self._discovery._session is not None:
                self._discovery._session.channel.send(Withdraw(worker_id=worker_id))


class _Session(ClientSession[HubMessage]):
    """One connection to the hub."""

    def __init__(self, discovery: LocalDiscovery, identity: Identity, config: DiscoveryConfig) -> None:
        super().__init__(hub_protocol(config), identity)
        self._discovery = discovery
        self._welcomed = self.awaited()
        self._present: set[WorkerId] | None = None  # workers reported before `WatchSynced`; None after it
        self._timer: asyncio.TimerHandle | None = None

    @property
    def welcome(self) -> Welcome:
        """The hub's, once connected."""
        welcome: Welcome = self._welcomed.result()
        return welcome

    async def enter(self) -> None:
        await self._welcomed

    def begin(self, registrations: "tuple[LocalRegistration, ...]", *, watch: bool) -> None:
        """Send registrations, watch, and start to renew leases."""
        for registration in registrations:
            registration.send()
        if watch:
            self.watch()
        self._renew(self.welcome.lease_ttl_s / 3)

    def watch(self) -> None:
        self._present = set()
        self.channel.send(Watch())

    def received(self, message: HubMessage) -> None:
        match message:
            case Change(change=change):
                self._on_change(change)
            case Registered(worker_id=worker_id):
                registration = self._discovery._registrations.get(worker_id)
                if registration is not None:
                    registration.answered(message)
            case Refusals(count=count):
                self._discovery._metrics.refused_clients.set(count)
            case Lapsed(worker_ids=worker_ids):
                self._on_lapsed(worker_ids)
            case Welcome() if self._welcomed.cancelled():
                pass  # nobody waits for it any more: the process ends
            case Welcome() if not self._welcomed.done():
                self._welcomed.set_result(message)
            case _:
                raise ProtocolError(
                    f"{type(message).__name__}: a hub does not send this; update the older side"
                )

    def channel_closed(self, reason: str) -> None:
        if self._timer is not None:
            self._timer.cancel()
        silent = f", before the hub said anything: {_SILENT}"
        super().channel_closed(f"{reason}{silent if self.is_silent else ''}")

    def _on_lapsed(self, worker_ids: tuple[WorkerId, ...]) -> None:
        """Register again those that are still ours."""
        for worker_id in worker_ids:
            registration = self._discovery._registrations.get(worker_id)
            if registration is not None:
                registration.send()

    def _on_change(self, change: InstanceChange) -> None:
        if self._present is not None:
            match change:
                case InstancePut(instance=instance):
                    self._present.add(instance.worker_id)
                case InstanceRemoved(worker_id=worker_id):
                    self._present.discard(worker_id)
                case WatchSynced():
                    present, self._present = self._present, None
                    self._discovery._on_synced(self.welcome.hub_id, present, self.welcome.lease_ttl_s)
        self._discovery._on_change(change)

    def _renew(self, interval_s: float) -> None:
        worker_ids = tuple(self._discovery._registrations)
        if worker_ids and self.channel.writable:
            self.channel.send(Renew(worker_ids=worker_ids))
        self._timer = asyncio.get_running_loop().call_later(interval_s, self._renew, interval_s)


_CLOSE_TIMEOUT_S = 0.5
_REFUSALS_EVERY_S = 1.0
"""Refused clients are told of at most this often: their number is the senders' choice."""


@dataclass(slots=True)
class _Lease:
    owner: "_Client"
    timer: asyncio.TimerHandle


class LocalHub:
    """The registry of one machine. One event loop owns it."""

    def __init__(
        self,
        identity: Identity,
        *,
        listen: str = "tcp://127.0.0.1:0",
        tls: PlaneTls | None = None,
        config: DiscoveryConfig | None = None,
    ) -> None:
        """Make a hub; `start` listens.

        Args:
            identity: has the deployment's secret, which every client must prove to know.
            listen: `unix:///PATH` or `tcp://HOST:PORT`.
            tls: certificates for TCP; None for no TLS.
            config: bounds and times.

        Raises:
            ConfigError: TCP without a secret.
        """
        self.config = config or DiscoveryConfig()
        self.identity = identity
        self.hub_id = secrets.token_hex(8)
        self.table = InstanceTable(watchers_max=self.config.connections_max)
        self.table.mark_synced()
        self.server: SessionServer[_Client] = SessionServer(
            hub_protocol(self.config),
            identity,
            _checked(Address.parse(listen, source="hub"), identity),
            lambda server: _Client(self, server),
            tls=tls,
        )
        self.refused_clients = 0
        """Clients whose secret, hash key or release is another."""
        self._refusals_timer: asyncio.TimerHandle | None = None
        self._leases: dict[WorkerId, _Lease] = {}

    @property
    def address(self) -> str:
        """Where clients connect; with the actual port after `start`."""
        return str(self.server.address)

    async def start(self) -> None:
        """Listen.

        Raises:
            ConfigError: the address is in use or not allowed.
        """
        await self.server.start()

    def watch(self) -> AsyncIterator[InstanceChange]:
        """Like `Discovery.watch`, for the supervisor's own process."""
        return self.table.watch()

    async def close(self) -> None:
        """Close the connections to all clients, which keep the instances they know. Safe twice."""
        if self._refusals_timer is not None:
            self._refusals_timer.cancel()
        await self.server.stop_listening()
        for lease in self._leases.values():
            lease.timer.cancel()
        self._leases.clear()
        await self.server.close("the hub closes", _CLOSE_TIMEOUT_S)
        self.table.close()

    def register(self, owner: "_Client", instance: Instance) -> None:
        worker_id = instance.worker_id
        if worker_id not in self._leases:
            if len(self._leases) >= self.config.instances_max:
                raise Overloaded(
                    f"worker {instance.name}: the hub has {len(self._leases)} registrations already (instances_max)"
                )
            _log.info(
                "instance_registered", worker=instance.name, worker_id=worker_id, address=instance.address
            )
        self._lease(worker_id, owner, self.config.lease_ttl_s, "lease expired")
        self.table.put(instance)

    def renew(self, owner: "_Client", worker_ids: tuple[WorkerId, ...]) -> tuple[WorkerId, ...]:
        """Renew the leases of this client; return the workers that it has no lease of."""
        lapsed = []
        for worker_id in worker_ids:
            lease = self._leases.get(worker_id)
            if lease is None or lease.owner is not owner:
                lapsed.append(worker_id)
            else:
                self._lease(worker_id, owner, self.config.lease_ttl_s, "lease expired")
        return tuple(lapsed)

    def withdraw(self, owner: "_Client", worker_id: WorkerId, reason: str) -> None:
        lease = self._leases.get(worker_id)
        if lease is not None and lease.owner is owner:
            self._drop(worker_id, reason)

    def disconnected(self, owner: "_Client", reason: str, *, on_purpose: bool) -> None:
        for worker_id in [w for w, lease in self._leases.items() if lease.owner is owner]:
            if on_purpose:
                self._drop(worker_id, "its process closed")
            else:
                self._lease(worker_id, owner, self.config.linger_s, f"its process is gone: {reason}")

    def refused(self) -> None:
        """Count a client that was refused; those that watch are told soon."""
        self.refused_clients += 1
        if self._refusals_timer is None:
            loop = asyncio.get_running_loop()
            self._refusals_timer = loop.call_later(_REFUSALS_EVERY_S, self._tell_refusals)

    def _tell_refusals(self) -> None:
        self._refusals_timer = None
        for client in self.server.sessions:
            client.tell_refusals()

    def check(self) -> None:
        assert self._leases.keys() == set(self.table), "hub: an instance for every lease, and no other"

    def _lease(self, worker_id: WorkerId, owner: "_Client", seconds: float, reason: str) -> None:
        lease = self._leases.get(worker_id)
        if lease is not None:
            lease.timer.cancel()
        timer = asyncio.get_running_loop().call_later(seconds, self._drop, worker_id, reason)
        self._leases[worker_id] = _Lease(owner, timer)

    def _drop(self, worker_id: WorkerId, reason: str) -> None:
        self._leases.pop(worker_id).timer.cancel()
        self.table.remove(worker_id, reason)
        _log.info("instance_removed", worker_id=worker_id, reason=reason)


class _Client(ServerSession[HubMessage]):
    """One client of the hub."""

    def __init__(self, hub: LocalHub, server: "SessionServer[_Client]") -> None:
        super().__init__(server)
        self._hub = hub
        self._cursor: TableCursor | None = None

    def trusted(self, _hello: Hello) -> None:
        self.admit()
        self.channel.send(Welcome(hub_id=self._hub.hub_id, lease_ttl_s=self._hub.config.lease_ttl_s))

    def refused(self, process: str, error: ErrorInfo) -> None:
        _log.warning("client_refused", process=process, error=error.message)
        if error.code == ProtocolError.code:
            self._hub.refused()

    def received(self, message: HubMessage) -> None:
        match message:
            case Register(instance=instance):
                self._on_register(instance)
            case Renew(worker_ids=worker_ids):
                lapsed = self._hub.renew(self, worker_ids)
                if lapsed:
                    self.channel.send(Lapsed(worker_ids=lapsed))
            case Withdraw(worker_id=worker_id):
                self._hub.withdraw(self, worker_id, "withdrawn")
            case Watch():
                if self._cursor is None:
                    self._cursor = self._hub.table.cursor(self._send_changes)
                    self._send_changes()
                    self.tell_refusals()
            case _:
                raise ProtocolError(f"{type(message).__name__}: a client of the hub does not send this")

    def tell_refusals(self) -> None:
        """Tell a client that watches how many were refused."""
        if self._cursor is not None and self.channel.writable:
            self.channel.send(Refusals(count=self._hub.refused_clients))

    def channel_writable(self) -> None:
        self._send_changes()

    def ended(self, reason: str) -> None:
        if self._cursor is not None:
            self._cursor.close()
        self._hub.disconnected(self, reason, on_purpose=self.channel.said_goodbye)

    def _on_register(self, instance: Instance) -> None:
        try:
            self._hub.register(self, instance)
            reply = Registered(worker_id=instance.worker_id)
        except PenstockError as error:
            reply = Registered(worker_id=instance.worker_id, error=error.to_info())
        self.channel.send(reply)

    def _send_changes(self) -> None:
        """Send pending changes to this watcher until the write buffer is full; `channel_writable` continues."""
        if self._cursor is not None:
            changes = self._cursor.changes()
            while self.channel.writable and (change := next(changes, None)) is not None:
                self.channel.send(Change(change=change))


def _checked(address: Address, identity: Identity) -> Address:
    if address.path:
        return address
    if not identity.secret:
        raise ConfigError(
            f"hub: {address}: a TCP hub needs a secret, since other users and hosts can reach it;"
            " give every process the deployment's secret"
        )
    return address
