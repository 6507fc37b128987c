"""The transfer agent of a process: registers memory, connects to other agents and moves bytes."""

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
from penstock.transfer.link.frames import decode_metadata
from penstock.transfer.link.grants import Grants
from penstock.transfer.link.handshake import Identity
from penstock.transfer.link.links import AgentLink
from penstock.transfer.notification_queue import NotificationQueue
from penstock.transfer.peer_table import PeerTable
from penstock.transfer.regions.arena import region_of
from penstock.transfer.regions.copies import pair_ranges
from penstock.transfer.regions.quarantine import Quarantine
from penstock.transfer.regions.regions import RegionTable, Registration, RemoteRegion
from penstock.transfer.requests.handles import PreparedTransfer, RunningTransfers, TransferHandle
from penstock.transfer.requests.peer import Peer
from penstock.transfer.requests.routes import Route

_log = get_logger()
_REFUSALS_KEPT = 64
_LAST_WAIT_S = 0.1
"""The least time that a peer has to release memory after it was cut off."""


class TransferAgent:
    """Moves bytes between registered memory of this process and of other processes, one-sided and without blocking.

    Use it as a context manager; leaving ends every transfer. One event loop owns it. Transfers have no order among each other.
    """

    def __init__(
        self,
        name: str,
        config: TransferConfig | None = None,
        *,
        transports: Iterable[Transport | Storage] | None = None,
    ) -> None:
        """Take the settings; the context manager opens the transports.

        Args:
            name: the agent's name at peers; unique among agents that connect to each other.
            config: bounds and times.
            transports: transports and storage to use; None for all that are built in.
        """
        self.name = name
        self.config = config or TransferConfig()
        self.counters = TransferCounters()
        self.refusals: deque[PenstockError] = deque(maxlen=_REFUSALS_KEPT)
        """The latest requests of peers that this agent refused."""
        self.identity = Identity(name, self.config)
        made = default_transports(self.config) if transports is None else transports
        self._transports, self._storage = allowed(made, self.config.transports)
        self._table = RegionTable()
        self._notification_queue = NotificationQueue(name, self.config.notifications_max, self.counters)
        self.running = RunningTransfers(self.config, self.counters, self._notification_queue)
        self.grants = Grants(self, self.config.connect_timeout_s)
        self._connections = Connections(self)
        self._quarantine = Quarantine(name, self._transports, self._storage, self.grants)
        self._peers = PeerTable(
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
            ConfigError: it cannot listen at an address of `config.listen`.
        """
        self._tasks = await asyncio.TaskGroup().__aenter__()
        self.running.open(self._tasks)
        try:
            for transport in list(self._transports.values()):
                try:
                    await transport.start(self)
                except TransferError as error:
                    self._peers.unavailable[transport.name] = error.message
                    del self._transports[transport.name]
                    await transport.close()
            for storage in self._storage.values():
                storage.start(self)
            self._addresses = self._connections.open(self.config.listen, self._tasks)
            await self._peers.find_routes(
                self._peers.own, {name: t.contact() for name, t in self._transports.items()}
            )
            self._peers.own.routes.update(
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
        """End every transfer and every link; registered memory is free when this returns. Safe twice.

        Raises:
            MemoryInUse: a peer that does not answer may still use some memory; that memory stays allocated as long as the
                process runs.
        """
        tasks, self._tasks = self._tasks, None
        if tasks is None:
            return
        await self.running.close(TransferError(f"agent {self.name} closes"))
        peers = [*self._peers.by_name.values(), self._peers.own]
        self._connections.close()
        for peer in peers:
            await peer.close_routes()
        for one in self._parts():
            await one.close()
        self._peers.let_go()
        for task in self._connections.tasks:
            task.cancel()
        await tasks.__aexit__(None, None, None)
        await self._quarantine.drain(self._table, self.config.heartbeat_timeout_s)

    # -- memory ---------------------------------------------------------------------------------------------------

    def register(self, memory: object, name: str = "", *, access: Access | None = None) -> Registration:
        """Register memory for transfers. Prefer one large region to many small ones.

        Args:
            memory: a `Region` (an `Arena`'s, a file's, an object store's), a numpy array, a torch tensor or any contiguous
            buffer; the agent keeps it alive.
            name: its name at peers; "" for the name of the `Region`.
            access: the most that any peer may do with it; None for all that the memory permits.

        Raises:
            TransferRefused: it is no memory, no transport can use it, or `access` asks to write read-only memory.
        """
        region = memory if isinstance(memory, Region) else region_of(memory, name)
        registration = self._table.register(
            region, self._transports, self._storage, self.unavailable, name=name, access=access
        )
        self._peers.own.infos[registration.region_id] = registration.info
        return registration

    async def deregister(self, registration: Registration) -> None:
        """Deregister memory: transfers that use it end with an error, here and at peers, before this returns.

        Raises:
            TransferRefused: it is not registered (any more), or by another agent.
            MemoryInUse: a peer that may still use it did not answer within `heartbeat_timeout_s`. The agent keeps the memory
                alive until the peer answers or ends (`quarantined`); call this again to wait on.
        """
        began_s = asyncio.get_running_loop().time()
        if registration not in self._quarantine:
            await self._withdraw(registration)
        left_s = self.config.heartbeat_timeout_s - (asyncio.get_running_loop().time() - began_s)
        await self._quarantine.release(registration, max(left_s, _LAST_WAIT_S))

    @property
    def quarantined(self) -> tuple[Registration, ...]:
        """Deregistered memory that a peer without an answer may still use."""
        return self._quarantine.held

    def _parts(self) -> list[Transport | Storage]:
        return [*self._transports.values(), *self._storage.values()]

    async def _withdraw(self, registration: Registration) -> None:
        region_id = registration.region_id
        self._table.remove(registration)
        self._peers.own.infos.pop(region_id, None)
        gone = TransferRefused(f"region {region_id} of agent {self.name} was deregistered")
        await self.running.end_local(region_id, gone)
        await self._connections.withdraw(region_id)
        for one in self._parts():
            await one.deregister(region_id)

    # -- peers ----------------------------------------------------------------------------------------------------

    def metadata(
        self, regions: Iterable[Registration] | None = None, *, access: Access | None = None
    ) -> bytes:
        """Encode what a peer needs to `connect`. Transmit it safely: whoever has it has access.

        Args:
            regions: regions that the peer may use; None for all that are registered now. Later metadata can add regions.
            access: what the peer may do with them; None for all that each registration allows.

        Raises:
            TransferRefused: a region is not registered here (any more), or not for such access.
        """
        given = list(self._table) if regions is None else [self._table.expect(region) for region in regions]
        contacts = {name: transport.contact() for name, transport in self._transports.items()}
        return self.identity.metadata(
            self._addresses, contacts, (registration.given(access) for registration in given)
        )

    async def connect(self, metadata: bytes) -> Peer:
        """Connect to another agent; if it is connected already, add the regions that the metadata names.

        Args:
            metadata: the result of its `metadata`.

        Raises:
            ProtocolError: this is no metadata, the peer speaks another version, or the two `secret`s differ.
            PeerLost: it cannot be reached; the text lists the addresses that were tried.
        """
        found = decode_metadata(metadata)
        if found.token == self.identity.token:
            raise ProtocolError(
                f"agent {self.name}: that is its own metadata; transfers within it need no peer"
            )
        if self._tasks is None:
            raise TransferError(f"agent {self.name} is not open; use it within `async with`")
        return await self._peers.meet(found)

    async def disconnect(self, peer: Peer | str) -> None:
        """End all transfers with a peer and its link. No error if it is not connected."""
        known = self._peers.by_name.get(peer if isinstance(peer, str) else peer.name)
        if known is not None:
            await self._peers.forget(known, "disconnected")

    @property
    def peers(self) -> Mapping[str, Peer]:
        """The connected agents by name, without those that were lost."""
        return self._peers.by_name

    @property
    def transport_names(self) -> tuple[str, ...]:
        """Names of the transports that work here; before the agent is entered, of those that it will try."""
        return tuple(self._transports)

    def setup_s(self, name: str) -> float:
        """Give the seconds that a transport needs before its first transfer with a peer."""
        return self._transports[name].setup_s

    @property
    def unavailable(self) -> Mapping[str, str]:
        """Why transports cannot work here, by name."""
        return self._peers.unavailable

    # -- transfers ------------------------------------------------------------------------------------------------

    def prepare(
        self, local: Descriptors, remote: Descriptors, peer: Peer | str | None = None
    ) -> PreparedTransfer:
        """Check and merge two lists of ranges; the result can be posted any number of times.

        Args:
            local: ranges of this agent's regions.
            remote: ranges of the peer's regions, as many and each as long; of this agent's own if there is no peer.
            peer: whose; None for this agent itself, as for files.

        Raises:
            TransferRefused: the lists do not fit each other, or the registered regions.
            PeerLost: there is no such peer (any more).
        """
        there = self._peers.find(peer)
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
        """Post a transfer and return at once. A small one is done by then.

        Args:
            op: READ from the peer into this agent's memory, or WRITE.
            local: ranges of this agent's regions.
            remote: ranges of the peer's regions, as many and each as long.
            peer: whose; None for this agent itself, as for files.
            notify: a notification for the peer, sent after all bytes have arrived; b"" for none.
            timeout_s: the deadline; None for the configured one.
            checksum: whether to verify the bytes (`ChecksumMismatch`); None for the transport's default.

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
        """Estimate the seconds of a transfer by the fastest transport to a peer, from its cost and measured transfers.

        Args:
            op: the direction.
            num_bytes: of all ranges.
            ranges: how many.
            peer: whose memory is at the other end; None for this agent itself, as for files.
            remote: a region of the peer; only transports that reach it count. None for all transports.

        Raises:
            PeerLost: there is no such peer (any more).
            TransferError: no transport reaches it.
        """
        there = self._peers.find(peer)
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
        """Yield notifications for ever: (agent's name, payload). One reader at a time."""
        return self._notification_queue.read()

    def send_notification(self, peer: Peer | str, payload: bytes) -> None:
        """Send a notification to a connected agent, whichever side connected. Notifications are ordered and not acknowledged.

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
        """The number of posted transfers that have not ended."""
        return len(self.running)

    # -- for prepared transfers -----------------------------------------------------------------------------------

    def check_prepared(self, prepared: PreparedTransfer, op: TransferOp) -> None:
        prepared.peer.check_alive()
        for region_id in prepared.local_ids:
            registration = self._table.get(region_id)
            if op is TransferOp.READ:
                registration.check_writable()
        for region_id in prepared.remote_ids:
            if prepared.peer is not self._peers.own:
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
        """Count, log and keep a peer's request that was refused."""
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
        """End the transfers that use a peer's deregistered region, then tell the peer."""
        await self._peers.withdrawn(link, region_id)
        link.withdraw_done(region_id)

    def note_departure(self, link: AgentLink) -> bool:
        """Note the memory that a leaving peer may still use; say whether there is any."""
        return self._quarantine.note_departure(link)

    def lost(self, link: AgentLink, error: PenstockError) -> None:
        """End all that uses a link that has ended."""
        for transport in self._transports.values():
            transport.lost(link, error)
        peer = self._peers.lost(link)
        if peer is not None:
            self.counters.lost_peers += 1
            if self._tasks is not None:  # else `close` lets go of it
                self.spawn(self._peers.forget(peer, error.message, PeerLost(error.message)))
