"""One process's end of all transfers: it registers memory, meets other agents and moves bytes between theirs and its own."""

import asyncio
import os
import secrets
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Self

from penstock.core.descriptors import Descriptors, Region, TransferOp
from penstock.core.errors import (
    PeerLost,
    PenstockError,
    ProtocolError,
    TransferError,
    TransferRefused,
)
from penstock.core.log import get_logger
from penstock.seams import Transport
from penstock.transfer.buffers import region_of
from penstock.transfer.config import TransferConfig
from penstock.transfer.counters import TransferCounters, add
from penstock.transfer.cuda import CudaTransport
from penstock.transfer.file import FileTransport
from penstock.transfer.frames import NOTIFICATION_BYTES_MAX
from penstock.transfer.greeting import Proof
from penstock.transfer.handle import TransferHandle
from penstock.transfer.links import AgentLink
from penstock.transfer.memory import MemoryTransport
from penstock.transfer.metadata import (
    TRANSFER_VERSION,
    AgentMetadata,
    decode_metadata,
    encode_metadata,
    host_fingerprint,
)
from penstock.transfer.nixl import NixlTransport
from penstock.transfer.object import ObjectTransport
from penstock.transfer.pairs import pair_ranges
from penstock.transfer.peer import Peer, Way
from penstock.transfer.prepared import PreparedTransfer
from penstock.transfer.regions import RegionTable, Registration, RemoteRegion
from penstock.transfer.running import RunningTransfers, too_long
from penstock.transfer.shm import ShmTransport
from penstock.transfer.switchboard import Switchboard
from penstock.transfer.tcp import TcpTransport
from penstock.transfer.tls import TlsIdentity

_log = get_logger()
_TOKEN_BYTES = 16
_REFUSALS_KEPT = 64


def default_transports(config: TransferConfig) -> list[Transport]:
    """Make one of each transport there is; those that cannot work here say so when they start."""
    storage = config.storage
    copying = min(config.threads, max(1, len(os.sched_getaffinity(0)) // 2))
    return [
        MemoryTransport(threads=copying, inline_bytes_max=config.inline_bytes_max),
        ShmTransport(threads=copying, inline_bytes_max=config.inline_bytes_max),
        TcpTransport(
            config.tcp,
            streams=config.threads,
            inline_bytes_max=config.inline_bytes_max,
            idle_s=1.5
            * config.heartbeat_timeout_s,  # where the whole link is silent, that is the better word
        ),
        CudaTransport(),
        NixlTransport(),
        FileTransport(threads=storage.io_threads, io_bytes=storage.io_bytes),
        ObjectTransport(
            requests=storage.requests,
            request_timeout_s=storage.request_timeout_s,
            retries=storage.request_retries,
        ),
    ]


class TransferAgent:
    """Moves bytes between registered memory of this process and that of others, one-sided and without blocking.

    Enter it; leaving ends every transfer. One event loop owns it. Transfers are not ordered among each other.
    """

    def __init__(
        self,
        name: str,
        config: TransferConfig | None = None,
        *,
        transports: Iterable[Transport] | None = None,
    ) -> None:
        """Do nothing yet.

        Args:
            name: what peers call it; unique among the agents that meet.
            config: bounds and times.
            transports: to use instead of all that are built in.
        """
        self.name = name
        self.config = config or TransferConfig()
        self.counters = TransferCounters()
        self.refusals: deque[PenstockError] = deque(maxlen=_REFUSALS_KEPT)
        """The latest refusals of what others asked of this agent."""
        self.unavailable: dict[str, str] = {}
        """Why transports cannot work here, by name."""
        self.token = secrets.token_bytes(_TOKEN_BYTES)
        made = list(default_transports(self.config) if transports is None else transports)
        self._transports = {transport.name: transport for transport in _chosen(made, self.config.transports)}
        self._table = RegionTable()
        self._own = Peer(name, self.token, None)
        self._peers: dict[str, Peer] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self.running = RunningTransfers(self.config, self.counters, self._notify)
        self._notifications: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue()
        self._proof = Proof(self.config.secret.get_secret_value().encode(), self.token)
        self.host = host_fingerprint()
        self.tls = TlsIdentity.of(self.config.tls)
        self._switchboard = Switchboard(self)
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
                    self.unavailable[transport.name] = error.message
                    del self._transports[transport.name]
                    await transport.close()
            self._addresses = self._switchboard.open(self.config.listen, self._tasks)
            await self._open_ways(self._own, {name: t.contact() for name, t in self._transports.items()})
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End every transfer and every link; memory that was registered is free then. Safe twice."""
        tasks, self._tasks = self._tasks, None
        if tasks is None:
            return
        await self.running.close(TransferError(f"agent {self.name} closes"))
        self._switchboard.close()
        for peer in [*self._peers.values(), self._own]:
            await _close_ways(peer)
        self._peers.clear()
        for transport in self._transports.values():
            await transport.close()
        for task in self._switchboard.tasks:
            task.cancel()
        await tasks.__aexit__(None, None, None)

    # -- memory ---------------------------------------------------------------------------------------------------

    def register(self, memory: object, name: str = "") -> Registration:
        """Make memory known, so that transfers can use it. Prefer one large region to many small ones.

        Args:
            memory: a `Region` (an `Arena`'s, a file's, an object store's), a numpy array, a torch tensor or any
                contiguous buffer; it is kept alive.
            name: how peers find it.

        Raises:
            TransferRefused: it is no memory, or no transport has any use for it.
        """
        region = memory if isinstance(memory, Region) else region_of(memory, name)
        region_id = self._table.next_id()
        ways: dict[str, bytes] = {}
        why: list[str] = []
        for transport in self._transports.values():
            try:
                way = transport.register(region_id, region)
            except TransferError as error:
                why.append(f"{transport.name}: {error.message}")
                continue
            if way is not None:
                ways[transport.name] = way
        if not ways:
            reasons = "; ".join([*why, *(f"{name}: {text}" for name, text in self.unavailable.items())])
            raise TransferRefused(
                f"region of {region.size_bytes} bytes, {region.kind.value}: no transport has any use for it"
                f" ({reasons or ', '.join(self._transports)})"
            )
        registration = self._table.add(region_id, region, ways)
        self._own.infos[region_id] = registration.info
        return registration

    async def deregister(self, registration: Registration) -> None:
        """Forget memory: what uses it ends with an error, here and at peers, and has ended when this returns.

        Raises:
            TransferRefused: it is not registered (any more).
        """
        region_id = registration.region_id
        self._table.get(region_id)
        self._table.remove(region_id)
        self._own.infos.pop(region_id, None)
        gone = TransferRefused(f"region {region_id} of agent {self.name} was deregistered")
        await self.running.end_local(region_id, gone)
        await self._switchboard.withdraw(region_id)
        for transport in self._transports.values():
            await transport.deregister(region_id)

    def query(self, region: Registration | RemoteRegion) -> Mapping[str, object]:
        """Say what is known of a region: kind, size, whether it is still registered, transports, transfers under way.

        Keys: `kind`, `size_bytes`, `name`, `registered`, `transports`, `transfers`.
        """
        info = region.info
        registered = region.region_id in (
            self._table if isinstance(region, Registration) else self._known_ids()
        )
        return {
            "kind": info.kind,
            "size_bytes": info.size_bytes,
            "name": info.name,
            "registered": registered,
            "transports": tuple(info.ways),
            "transfers": self.running.count(region.region_id, local=isinstance(region, Registration)),
        }

    # -- peers ----------------------------------------------------------------------------------------------------

    def metadata(self, regions: Iterable[Registration] | None = None) -> bytes:
        """Say what a peer has to know to `connect`, to be handed to it by any safe means: who has it, has access.

        Args:
            regions: what the peer may read and write; None for all that are registered now. It can be handed more later.

        Raises:
            TransferRefused: one of them is not registered (any more).
        """
        given = (
            list(self._table)
            if regions is None
            else [self._table.get(region.region_id) for region in regions]
        )
        return encode_metadata(
            AgentMetadata(
                version=TRANSFER_VERSION,
                name=self.name,
                token=self.token,
                host=self.host,
                pid=os.getpid(),
                addresses=self._addresses,
                contacts={name: transport.contact() for name, transport in self._transports.items()},
                regions=tuple(registration.info for registration in given),
                certificate=self.tls.fingerprint if self.tls else b"",
            )
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
        if found.token == self.token:
            raise ProtocolError(
                f"agent {self.name}: that is its own metadata; transfers within it need no peer"
            )
        async with self._locks.setdefault(found.name, asyncio.Lock()):
            known = self._peers.get(found.name)
            if (
                known is None
                or known.token != found.token
                or known.link is None
                or known.link.error is not None
            ):
                if known is not None:
                    await self._forget(known, "it connects anew")
                known = await self._meet(found)
            known.infos.update((info.region_id, info) for info in found.regions)
            return known

    async def disconnect(self, peer: Peer | str) -> None:
        """End all transfers with a peer and forget it. No error if it is gone."""
        known = self._peers.get(peer if isinstance(peer, str) else peer.name)
        if known is not None:
            await self._forget(known, "disconnected")

    @property
    def peers(self) -> Mapping[str, Peer]:
        """The agents that this one has connected to, by name."""
        return self._peers

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
        there = self._peer(peer)
        self._table.check(local, writes=False)
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
        there = self._peer(peer)
        seconds = [
            way.speeds.seconds(op, way.channel.cost(op), num_bytes, ranges)
            for way in there.ways.values()
            if remote is None or way.channel.refusal(op, (), (remote.info,)) is None
        ]
        if not seconds:
            raise TransferError(f"no transport reaches agent {there.name}: {there.unreachable}")
        return min(seconds)

    async def notifications(self) -> AsyncIterator[tuple[str, bytes]]:
        """Yield what peers sent with transfers or alone: (agent's name, payload), for ever. One reader at a time."""
        while True:
            yield await self._notifications.get()

    def send_notification(self, peer: Peer | str, payload: bytes) -> None:
        """Tell a peer something; one that this agent connected to, or that connected to it. Ordered, not acknowledged.

        Raises:
            PeerLost: there is no link to it.
            TransferRefused: it is too long.
        """
        name = peer if isinstance(peer, str) else peer.name
        self._notify(self._switchboard.link_to(name), payload)

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
            if region_id not in prepared.peer.infos:
                raise TransferRefused(f"region {region_id} of agent {prepared.peer.name} is gone")
            if prepared.peer is self._own and op is TransferOp.WRITE:
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
        self._switchboard.create_task(work)

    def transport(self, name: str) -> Transport | None:
        return self._transports.get(name)

    @property
    def proof(self) -> Proof:
        return self._proof

    def proof_for(self, token: bytes) -> Proof:
        """Make what is proved to the agent with this token."""
        return Proof(self.config.secret.get_secret_value().encode(), token)

    def notified(self, link: AgentLink, payload: bytes) -> None:
        """Take a notification.

        Raises:
            ProtocolError: nobody reads them.
        """
        if self._notifications.qsize() >= self.config.notifications_max:
            raise ProtocolError(
                f"agent {self.name} has {self._notifications.qsize()} notifications that nobody has read"
                " (notifications_max); read `notifications()`"
            )
        self.counters.notifications_received += 1
        self._notifications.put_nowait((link.peer, payload))

    async def withdrawn(self, link: AgentLink, region_id: int) -> None:
        """A peer's region is gone: end what uses it, then say so."""
        peer = self._peers.get(link.peer)
        if peer is not None and peer.link is link:
            peer.infos.pop(region_id, None)
            gone = TransferRefused(f"region {region_id} of agent {peer.name} was deregistered there")
            await self.running.end_remote(peer, region_id, gone)
        link.withdraw_done(region_id)

    def lost(self, link: AgentLink, error: PenstockError) -> None:
        """A link has ended: so has all that goes over it."""
        for transport in self._transports.values():
            transport.lost(link, error)
        peer = self._peers.get(link.peer)
        if peer is not None and peer.link is link:
            self.counters.lost_peers += 1
            self.running.doom_peer(peer, PeerLost(error.message))

    # -- inside ---------------------------------------------------------------------------------------------------

    def _peer(self, peer: Peer | str | None) -> Peer:
        if peer is None:
            return self._own
        name = peer if isinstance(peer, str) else peer.name
        known = self._peers.get(name)
        if known is None or (isinstance(peer, Peer) and peer is not known):
            raise PeerLost(f"agent {name} is not connected (any more); connect to it first")
        known.check_alive()
        return known

    def _known_ids(self) -> set[int]:
        return {region_id for peer in self._peers.values() for region_id in peer.infos}

    async def _meet(self, found: AgentMetadata) -> Peer:
        link = await self._switchboard.dial(found)
        peer = Peer(found.name, found.token, link)
        peer.infos.update((info.region_id, info) for info in found.regions)
        self._peers[found.name] = peer
        await self._open_ways(peer, found.contacts)
        peer.check_alive()
        return peer

    async def _open_ways(self, peer: Peer, contacts: Mapping[str, bytes]) -> None:
        """Find out which transports reach a peer."""
        for name, transport in self._transports.items():
            contact = contacts.get(name)
            if contact is None:
                peer.unreachable[name] = f"agent {peer.name} does not have it"
                continue
            try:
                async with asyncio.timeout(self.config.connect_timeout_s):
                    channel = await transport.connect(peer.link, contact, peer.infos)
            except TransferError as error:
                peer.unreachable[name] = error.message
            except TimeoutError:
                peer.unreachable[name] = (
                    f"no answer within {self.config.connect_timeout_s:g} s (connect_timeout_s)"
                )
            else:
                peer.ways[name] = Way(name, channel, transport.checksums)
        for name, why in self.unavailable.items():
            peer.unreachable[name] = why

    async def _forget(self, peer: Peer, why: str) -> None:
        if self._peers.get(peer.name) is peer:
            del self._peers[peer.name]
        await self.running.end_peer(peer, PeerLost(f"agent {peer.name}: {why}"))
        if peer.link is not None:
            peer.link.close(why)
        await _close_ways(peer)

    def _notify(self, link: AgentLink | None, payload: bytes) -> None:
        if len(payload) > NOTIFICATION_BYTES_MAX:
            raise too_long(payload)
        self.counters.notifications_sent += 1
        if link is None:
            self._notifications.put_nowait((self.name, payload))
        else:
            link.notify(payload)


async def _close_ways(peer: Peer) -> None:
    for way in peer.ways.values():
        await way.channel.close()
    peer.ways.clear()


def _chosen(made: Sequence[Transport], names: tuple[str, ...] | None) -> Sequence[Transport]:
    if names is None:
        return made
    known = {transport.name for transport in made}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise TransferError(f"transports: {unknown[0]!r} is unknown; there are {', '.join(sorted(known))}")
    return [transport for transport in made if transport.name in names]
