"""One process's end of all transfers: it registers memory, meets other agents and moves bytes between theirs and its own."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping
from types import TracebackType
from typing import Self

from penstock.core.descriptors import Access, Descriptors, Region, TransferOp
from penstock.core.errors import (
    PeerLost,
    PenstockError,
    ProtocolError,
    TransferError,
    TransferRefused,
)
from penstock.core.log import get_logger
from penstock.seams import Storage, Transport
from penstock.transfer.config import TransferConfig
from penstock.transfer.counters import TransferCounters, add
from penstock.transfer.default_transports import allowed, default_transports
from penstock.transfer.link.connections import Connections
from penstock.transfer.link.grants import Grants
from penstock.transfer.link.identity import Identity
from penstock.transfer.link.links import AgentLink
from penstock.transfer.link.metadata import decode_metadata
from penstock.transfer.notification_queue import NotificationQueue
from penstock.transfer.peer_table import PeerTable
from penstock.transfer.regions.buffers import region_of
from penstock.transfer.regions.pairs import pair_ranges
from penstock.transfer.regions.quarantine import Quarantine
from penstock.transfer.regions.regions import RegionTable, Registration, RemoteRegion
from penstock.transfer.requests.handle import TransferHandle
from penstock.transfer.requests.peer import Peer
from penstock.transfer.requests.prepared import PreparedTransfer
from penstock.transfer.requests.routes import Route
from penstock.transfer.requests.running import RunningTransfers

_log = get_logger()
_REFUSALS_KEPT = 64
_LAST_WAIT_S = 0.1
"""What a peer that was cut off has left to let go of memory."""


class TransferAgent:
    """Moves bytes between registered memory of this process and that of others, one-sided and without blocking.

    Enter it; leaving ends every transfer. One event loop owns it. Transfers are not ordered among each other.
    """

    def __init__(
        self,
        name: str,
        config: TransferConfig | None = None,
        *,
        transports: Iterable[Transport | Storage] | None = None,
    ) -> None:
        """Do nothing yet.

        Args:
            name: what peers call it; unique among the agents that meet.
            config: bounds and times.
            transports: with storage among them, to use instead of all that are built in.
        """
        self.name = name
        self.config = config or TransferConfig()
        self.counters = TransferCounters()
        self.refusals: deque[PenstockError] = deque(maxlen=_REFUSALS_KEPT)
        """The latest refusals of what others asked of this agent."""
        self.identity = Identity(name, self.config)
        made = default_transports(self.config) if transports is None else transports
        self._transports, self._storage = allowed(made, self.config.transports)
        self._table = RegionTable()
        self._notification_queue = NotificationQueue(name, self.config.notifications_max, self.counters)
        self.running = RunningTransfers(self.config, self.counters, self._notification_queue)
        self.grants = Grants(self, self.config.connect_timeout_s)
        self._connections = Connections(self)
        self._quarantine = Quarantine(name, self._transports, self._storage, self.grants)
        self._met = PeerTable(
            Peer(name, self.identity.token, None),
            self._connections,
            self._transports,
            self.running,
            self.config.connect_timeout_s,
        )
        self._addresses: tuple[str, ...] = ()
        self._tasks: asyncio.TaskGroup | None = None

    async def __aenter__(self) -> Self:
        """Start transports and listen.

        Raises:
            ConfigError: it cannot listen as it should.
        """
        self._tasks = await asyncio.TaskGroup().__aenter__()
        self.running.open(self._tasks)
        try:
            for transport in list(self._transports.values()):
                try:
                    await transport.start(self)
                except TransferError as error:
                    self._met.unavailable[transport.name] = error.message
                    del self._transports[transport.name]
                    await transport.close()
            for storage in self._storage.values():
                storage.start(self)
            self._addresses = self._connections.open(self.config.listen, self._tasks)
            await self._met.find_ways(
                self._met.own, {name: t.contact() for name, t in self._transports.items()}
            )
            self._met.own.routes.update(
                {name: Route(name, storage, storage) for name, storage in self._storage.items()}
            )
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End every transfer and every link; memory that was registered is free then. Safe twice.

        Raises:
            MemoryInUse: a peer that does not answer may still use some of it, which stays as long as the process does.
        """
        tasks, self._tasks = self._tasks, None
        if tasks is None:
            return
        await self.running.close(TransferError(f"agent {self.name} closes"))
        peers = [*self._met.by_name.values(), self._met.own]
        self._connections.close()
        for peer in peers:
            await peer.close_ways()
        for one in self._parts():
            await one.close()
        self._met.let_go()
        for task in self._connections.tasks:
            task.cancel()
        await tasks.__aexit__(None, None, None)
        await self._quarantine.drain(self._table, self.config.heartbeat_timeout_s)

    # -- memory ---------------------------------------------------------------------------------------------------

    def register(self, memory: object, name: str = "", *, access: Access | None = None) -> Registration:
        """Make memory known, so that transfers can use it. Prefer one large region to many small ones.

        Args:
            memory: a `Region` (an `Arena`'s, a file's, an object store's), a numpy array, a torch tensor or any
                contiguous buffer; it is kept alive.
            name: how peers find it; "" for the name that a `Region` brings.
            access: the most that peers may do with it, whatever metadata they are given; None for all that the memory
                lets them.

        Raises:
            TransferRefused: it is no memory, no transport has any use for it, or it cannot be written as `access` says.
        """
        region = memory if isinstance(memory, Region) else region_of(memory, name)
        registration = self._table.register(
            region, self._transports, self._storage, self.unavailable, name=name, access=access
        )
        self._met.own.infos[registration.region_id] = registration.info
        return registration

    async def deregister(self, registration: Registration) -> None:
        """Forget memory: what uses it ends with an error, here and at peers, and has ended when this returns.

        Raises:
            TransferRefused: it is not registered (any more), or by another agent.
            MemoryInUse: who may still use it did not answer within `heartbeat_timeout_s`. The agent keeps the memory alive
                until that one answers or ends (`quarantined`); this may be called again to wait for it.
        """
        began_s = asyncio.get_running_loop().time()
        if registration not in self._quarantine:
            await self._withdraw(registration)
        left_s = self.config.heartbeat_timeout_s - (asyncio.get_running_loop().time() - began_s)
        await self._quarantine.release(registration, max(left_s, _LAST_WAIT_S))

    @property
    def quarantined(self) -> tuple[Registration, ...]:
        """What was deregistered while somebody who does not answer could use it, and is not free yet."""
        return self._quarantine.held

    def _parts(self) -> list[Transport | Storage]:
        return [*self._transports.values(), *self._storage.values()]

    async def _withdraw(self, registration: Registration) -> None:
        region_id = registration.region_id
        self._table.remove(registration)
        self._met.own.infos.pop(region_id, None)
        gone = TransferRefused(f"region {region_id} of agent {self.name} was deregistered")
        await self.running.end_local(region_id, gone)
        await self._connections.withdraw(region_id)
        for one in self._parts():
            await one.deregister(region_id)

    # -- peers ----------------------------------------------------------------------------------------------------

    def metadata(
        self, regions: Iterable[Registration] | None = None, *, access: Access | None = None
    ) -> bytes:
        """Say what a peer has to know to `connect`, to be handed to it by any safe means: who has it, has access.

        Args:
            regions: what the peer may use; None for all that are registered now. It can be handed more later.
            access: what it may do with them; None for all that each registration allows.

        Raises:
            TransferRefused: one of them is not registered (any more), or by another agent, or not for such access.
        """
        given = list(self._table) if regions is None else [self._table.expect(region) for region in regions]
        contacts = {name: transport.contact() for name, transport in self._transports.items()}
        return self.identity.metadata(
            self._addresses, contacts, (registration.given(access) for registration in given)
        )

    async def connect(self, metadata: bytes) -> Peer:
        """Meet another agent, or learn of more of its regions.

        Args:
            metadata: what its `metadata` gave.

        Raises:
            ProtocolError: that is no metadata, of another version, or the peer's `secret` is another one.
            PeerLost: it cannot be reached; the text says at which addresses it was tried.
        """
        found = decode_metadata(metadata)
        if found.token == self.identity.token:
            raise ProtocolError(
                f"agent {self.name}: that is its own metadata; transfers within it need no peer"
            )
        if self._tasks is None:
            raise TransferError(f"agent {self.name} is not open; use it within `async with`")
        return await self._met.meet(found)

    async def disconnect(self, peer: Peer | str) -> None:
        """End all transfers with a peer and forget it. No error if it is gone."""
        known = self._met.by_name.get(peer if isinstance(peer, str) else peer.name)
        if known is not None:
            await self._met.forget(known, "disconnected")

    @property
    def peers(self) -> Mapping[str, Peer]:
        """The agents that this one is connected to, by name; one that is lost is forgotten."""
        return self._met.by_name

    @property
    def transport_names(self) -> tuple[str, ...]:
        """Those that may reach other agents: that work here, or before it is entered, that it will try."""
        return tuple(self._transports)

    def setup_s(self, name: str) -> float:
        """Say what one of these takes to reach another agent for the first time, in seconds."""
        return self._transports[name].setup_s

    @property
    def unavailable(self) -> Mapping[str, str]:
        """Why transports cannot work here, by name."""
        return self._met.unavailable

    # -- transfers ------------------------------------------------------------------------------------------------

    def prepare(
        self, local: Descriptors, remote: Descriptors, peer: Peer | str | None = None
    ) -> PreparedTransfer:
        """Check and merge two lists of ranges, to be posted again and again.

        Args:
            local: ranges of this agent's regions.
            remote: as many, each as long; of the peer's regions, or of this agent's own without one.
            peer: whose; None for this agent itself, as for files.

        Raises:
            TransferRefused: the lists do not fit each other or what is registered.
            PeerLost: there is no such peer (any more).
        """
        there = self._met.find(peer)
        self._table.check(local)
        there.check(remote)
        pairs = pair_ranges(local, remote)
        prepared = PreparedTransfer(self, there, pairs, [], len(local))
        prepared.regions.extend(self._table.get(region_id).region for region_id in prepared.local_ids)
        return prepared

    def post(
        self,
        op: TransferOp,
        local: Descriptors,
        remote: Descriptors,
        peer: Peer | str | None = None,
        *,
        notify: bytes = b"",
        timeout_s: float | None = None,
        checksum: bool | None = None,
    ) -> TransferHandle:
        """Begin to move bytes; returns at once, and small transfers are then done already.

        Args:
            op: READ from the peer into this agent's memory, or WRITE.
            local: ranges of this agent's regions.
            remote: as many, each as long, of the peer's.
            peer: whose; None for this agent itself, as for files.
            notify: given to the peer's `notifications` after all bytes have arrived; "" for nothing.
            timeout_s: the deadline; None for the configured one.
            checksum: whether bytes that arrive changed are an error; None for the transport's own habit.

        Raises:
            TransferRefused: this cannot be done, ever; the text says why.
            PeerLost: there is no such peer (any more).
            Overloaded: too many transfers are under way.
        """
        prepared = self.prepare(local, remote, peer)
        return prepared.post(op, notify=notify, timeout_s=timeout_s, checksum=checksum)

    def estimate(
        self,
        op: TransferOp,
        num_bytes: int,
        ranges: int,
        peer: Peer | str | None = None,
        *,
        remote: Registration | RemoteRegion | None = None,
    ) -> float:
        """Estimate a transfer in seconds: by the fastest transport to that peer, and by what was measured so far.

        Args:
            op: the direction.
            num_bytes: of all ranges.
            ranges: how many.
            peer: whose memory is at the other end; None for this agent itself, as for files.
            remote: a region there; then only transports that reach it count, as those of a file.

        Raises:
            PeerLost: there is no such peer (any more).
            TransferError: no transport reaches it.
        """
        there = self._met.find(peer)
        now_s = asyncio.get_running_loop().time()
        seconds = [
            route.seconds(op, num_bytes, ranges, now_s)
            for route in there.routes.values()
            if remote is None or route.channel.refusal(op, (), (remote.info,)) is None
        ]
        if not seconds:
            raise TransferError(f"no transport reaches agent {there.name}: {there.unreachable}")
        return min(seconds)

    def notifications(self) -> AsyncIterator[tuple[str, bytes]]:
        """Yield what peers sent with transfers or alone: (agent's name, payload), for ever. One reader at a time."""
        return self._notification_queue.read()

    def send_notification(self, peer: Peer | str, payload: bytes) -> None:
        """Tell a peer something; one that this agent connected to, or that connected to it. Ordered, not acknowledged.

        Raises:
            PeerLost: there is no link to it.
            TransferRefused: it is too long.
        """
        name = peer if isinstance(peer, str) else peer.name
        link = self._connections.link_to(name)
        self._notification_queue.check(link, payload)
        self._notification_queue.send(link, payload)

    @property
    def transfers_under_way(self) -> int:
        """How many transfers were posted and have not ended."""
        return len(self.running)

    # -- for prepared transfers -----------------------------------------------------------------------------------

    def check_prepared(self, prepared: PreparedTransfer, op: TransferOp) -> None:
        prepared.peer.check_alive()
        for region_id in prepared.local_ids:
            registration = self._table.get(region_id)
            if op is TransferOp.READ:
                registration.check_writable()
        for region_id in prepared.remote_ids:
            if prepared.peer is not self._met.own:
                prepared.peer.check_given(region_id, op)
            elif op is TransferOp.WRITE:
                self._table.get(region_id).check_writable()

    # -- for links and transports ---------------------------------------------------------------------------------

    def region(self, region_id: int) -> Region:
        return self._table.get(region_id).region

    def authorize(
        self, peer: str, key_by_region: Mapping[int, bytes], ranges: Descriptors, op: TransferOp
    ) -> None:
        try:
            self._table.authorize(key_by_region, ranges, op)
        except TransferRefused as error:
            self.refused(error, peer)
            raise

    def refused(self, error: PenstockError, peer: str) -> None:
        """Count and log what somebody asked for in vain."""
        add(self.counters.refused, error.code)
        self.refusals.append(error)
        _log.warning("transfer_refused", agent=self.name, peer=peer, error=error.message)

    def spawn(self, work: Coroutine[object, object, None]) -> None:
        self._connections.create_task(work)

    def transport(self, name: str) -> Transport | None:
        return self._transports.get(name)

    def notified(self, link: AgentLink, payload: bytes) -> None:
        self._notification_queue.received(link, payload)

    async def withdrawn(self, link: AgentLink, region_id: int) -> None:
        """A peer's region is gone: end what uses it, then say so."""
        await self._met.withdrawn(link, region_id)
        link.withdraw_done(region_id)

    def see_off(self, link: AgentLink) -> bool:
        """Note what a peer that leaves may still use."""
        return self._quarantine.see_off(link)

    def lost(self, link: AgentLink, error: PenstockError) -> None:
        """A link has ended: so has all that goes over it."""
        for transport in self._transports.values():
            transport.lost(link, error)
        peer = self._met.lost(link)
        if peer is not None:
            self.counters.lost_peers += 1
            if self._tasks is not None:  # else `close` lets go of it
                self.spawn(self._met.forget(peer, error.message, PeerLost(error.message)))
