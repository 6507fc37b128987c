"""The hub: one machine's registry, a server in the supervisor that keeps registrations for as long as their leases.

Nothing is stored on disk. Clients of a restarted hub register again by themselves.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass

from penstock.core.errors import ConfigError, ErrorInfo, Overloaded, PenstockError, ProtocolError
from penstock.core.ids import WorkerId
from penstock.core.log import get_logger
from penstock.core.net.address import Address
from penstock.core.types.instances import Instance, InstanceChange
from penstock.runtime.config import DiscoveryConfig
from penstock.runtime.discovery.messages import (
    Change,
    HubMessage,
    Lapsed,
    Refusals,
    Register,
    Registered,
    Renew,
    Watch,
    Welcome,
    Withdraw,
    hub_protocol,
)
from penstock.runtime.discovery.table import InstanceTable, TableCursor
from penstock.runtime.handshake import Hello, Identity
from penstock.runtime.session import ServerSession, SessionServer
from penstock.runtime.tls import PlaneTls

_CLOSE_TIMEOUT_S = 0.5
_REFUSALS_EVERY_S = 1.0
"""Refused clients are told of at most this often: their number is the senders' choice."""
_log = get_logger()


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
