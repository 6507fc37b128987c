"""The connected peers of an agent, each with the transports that reach it."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from weakref import WeakValueDictionary

from penstock.core.descriptors import Descriptors, MemoryKind, Region, RegionInfo, TransferOp
from penstock.core.errors import PeerLost, TransferError, TransferRefused
from penstock.seams import Storage, Transport
from penstock.transfer.link.connections import Connections
from penstock.transfer.link.frames import AgentMetadata
from penstock.transfer.link.links import AgentLink
from penstock.transfer.regions.quarantine import call_after
from penstock.transfer.regions.regions import RemoteRegion, distinct, expect_inside
from penstock.transfer.requests.handles import RunningTransfers
from penstock.transfer.requests.routes import Route

_STORED = {
    MemoryKind.FILE: "files of agent {} are reached by itself only; read its memory instead",
    MemoryKind.OBJECT: "object stores of agent {} are reached by itself only; register the same one here",
}


class Peer:
    """A connected agent with its regions and routes, from `TransferAgent.connect`."""

    def __init__(self, name: str, token: bytes, link: AgentLink | None) -> None:
        """Begin without regions and routes.

        Args:
            name: the peer's.
            token: of its metadata; another one after it restarts.
            link: to it; None for the agent's own memory.
        """
        self.name = name
        self.token = token
        self.link = link
        self.routes: dict[str, Route] = {}
        """Routes to it by transport."""
        self.unreachable: dict[str, str] = {}
        """By transport, why it does not reach the peer."""
        self.infos: dict[int, RegionInfo] = {}

    def learn(self, infos: Iterable[RegionInfo]) -> None:
        """Add regions; keys that were given before stay valid."""
        for info in infos:
            older = self.infos.get(info.region_id)
            self.infos[info.region_id] = info if older is None else info.with_keys_of(older)

    def check_given(self, region_id: int, op: TransferOp) -> None:
        """Check that the peer gave a region for this direction.

        Raises:
            TransferRefused: it did not, or the region is gone.
        """
        info = self.infos.get(region_id)
        if info is None:
            raise TransferRefused(f"region {region_id} of agent {self.name} is gone")
        if not info.key(op):
            given = "read-only" if op is TransferOp.WRITE else "write-only"
            raise TransferRefused(
                f"region {region_id} of agent {self.name} was given {given}; its owner has to register it, and give its"
                " metadata, with access=Access.BOTH"
            )

    @property
    def regions(self) -> Mapping[str, RemoteRegion]:
        """The named regions that this agent was given."""
        return {info.name: RemoteRegion(info.region_id, info) for info in self.infos.values() if info.name}

    def region(self, name: str) -> RemoteRegion:
        """Look up a region by its name.

        Raises:
            TransferRefused: it was not given.
        """
        found = self.regions.get(name)
        if found is None:
            given = ", ".join(sorted(self.regions)) or "none"
            raise TransferRefused(f"agent {self.name} gave no region named {name!r}; given: {given}")
        return found

    @property
    def is_lost(self) -> bool:
        """Whether the link has ended."""
        return self.link is not None and self.link.error is not None

    async def close_routes(self) -> None:
        """Close all channels to it; for the agent."""
        while self.routes:
            _, route = self.routes.popitem()
            await route.channel.close()

    def check_alive(self) -> None:
        """Check that the link lives.

        Raises:
            PeerLost: the link has ended.
        """
        if self.link is not None and self.link.error is not None:
            raise PeerLost(self.link.error.message)

    def check(self, ranges: Descriptors) -> None:
        """Check that ranges lie within regions that the peer gave.

        Raises:
            TransferRefused: a range does not.
        """
        for region_id in distinct(ranges.region_ids):
            expect_inside(ranges, region_id, self._info(region_id).size_bytes)

    def infos_of(self, ranges: Descriptors) -> list[RegionInfo]:
        return [self._info(region_id) for region_id in distinct(ranges.region_ids)]

    def routes_for(
        self, op: TransferOp, local: Sequence[Region], remote: Sequence[RegionInfo]
    ) -> tuple[list[Route], dict[str, str]]:
        """Find the routes that can move bytes between these regions, and by transport why others cannot."""
        able: list[Route] = []
        refusals = dict(self.unreachable)
        if self.link is not None:
            refusals |= {
                kind.value: _STORED[kind].format(self.name)
                for kind in dict.fromkeys(info.kind for info in remote)
                if kind in _STORED
            }
        for route in self.routes.values():
            refusal = route.channel.refusal(op, local, remote)
            if refusal is None:
                able.append(route)
            else:
                refusals[route.name] = refusal
        return able, refusals

    def _info(self, region_id: int) -> RegionInfo:
        info = self.infos.get(region_id)
        if info is None:
            raise TransferRefused(
                f"region {region_id} of agent {self.name} was not given to this agent, or is gone; connect with metadata"
                " that has it"
            )
        return info


class PeerTable:
    """One agent's peers by name, and the agent itself as the peer without a link. Its event loop owns it."""

    def __init__(
        self,
        own: Peer,
        connections: Connections,
        transports: Mapping[str, Transport],
        running: RunningTransfers,
        connect_timeout_s: float,
    ) -> None:
        """Begin without peers.

        Args:
            own: the agent itself.
            connections: opens links to others.
            transports: those that work here.
            running: the running transfers; those with a peer end with its link.
            connect_timeout_s: the longest time for a transport to find out whether it reaches a peer.
        """
        self.own = own
        self.unavailable: dict[str, str] = {}
        """Why transports cannot work here, by name."""
        self.by_name: dict[str, Peer] = {}
        self._connections = connections
        self._transports = transports
        self._running = running
        self._timeout_s = connect_timeout_s
        self._held: set[AgentLink] = set()  # to peers whose memory may be in use, the peer known or forgotten
        self._meeting: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def find(self, peer: Peer | str | None) -> Peer:
        """Look up a peer; the agent itself for None.

        Raises:
            PeerLost: it is not connected (any more).
        """
        if peer is None:
            return self.own
        name = peer if isinstance(peer, str) else peer.name
        known = self.by_name.get(name)
        if known is not None and (known is peer or isinstance(peer, str)):
            known.check_alive()
            return known
        if isinstance(peer, Peer):
            peer.check_alive()
        raise PeerLost(f"agent {name} is not connected (any more); connect to it first")

    async def meet(self, found: AgentMetadata) -> Peer:
        """Connect unless the peer is connected already, and add its regions.

        Raises:
            ProtocolError: its handshake failed.
            PeerLost: it cannot be reached, or the link ends meanwhile.
        """
        async with self._meeting.setdefault(found.name, asyncio.Lock()):
            known = self.by_name.get(found.name)
            if known is not None and (known.token != found.token or known.is_lost):
                await self.forget(known, "it connects anew")
                known = None
            if known is not None:
                known.learn(found.regions)
                return known
            link = await self._connections.dial(found)
            link.hold()
            self._held.add(link)
            peer = Peer(found.name, found.token, link)
            peer.learn(found.regions)
            self.by_name[peer.name] = peer
            try:
                await self.find_routes(peer, found.contacts)
                peer.check_alive()
            except BaseException:
                await self.forget(peer, "they did not come to know each other")
                raise
            return peer

    async def find_routes(self, peer: Peer, contacts: Mapping[str, bytes]) -> None:
        """Find out which transports reach a peer."""
        peer.unreachable.update(self.unavailable)
        for name, transport in self._transports.items():
            contact = contacts.get(name)
            if contact is None:
                peer.unreachable[name] = f"agent {peer.name} does not have it"
                continue
            try:
                async with asyncio.timeout(self._timeout_s):
                    channel = await transport.connect(peer.link, contact, peer.infos)
            except TransferError as error:
                peer.unreachable[name] = error.message
            except TimeoutError:
                peer.unreachable[name] = f"no answer within {self._timeout_s:g} s (connect_timeout_s)"
            else:
                peer.routes[name] = Route(name, channel, transport)

    async def forget(self, peer: Peer, why: str, error: PeerLost | None = None) -> None:
        """End all transfers with a peer, then its channels and its link.

        Args:
            peer: the peer to forget.
            why: the reason that the peer is told.
            error: the error of the transfers; None for one that says `why`.
        """
        self._drop(peer)
        link = peer.link
        try:
            await self._running.end_peer(peer, error or PeerLost(f"agent {peer.name}: {why}"))
            if link is not None:
                link.close(why)
            await peer.close_routes()
        finally:
            if link is not None:
                call_after(self._users(peer, link), lambda: self._let_go(link))

    def let_go(self) -> None:
        """Release every peer's memory, when the agent has closed."""
        for link in list(self._held):
            self._let_go(link)

    def _let_go(self, link: AgentLink) -> None:
        self._held.discard(link)
        link.let_go()

    def lost(self, link: AgentLink) -> Peer | None:
        """Remove the peer of a link that has ended.

        Returns:
            the peer, for the caller to `forget`; None if the link was not initiated here, or the peer is forgotten already.
        """
        peer = self._at(link)
        if peer is not None:
            self._drop(peer)
        return peer

    async def withdrawn(self, link: AgentLink, region_id: int) -> None:
        """End the transfers that use a deregistered region of a peer, and have channels forget it."""
        peer = self._at(link)
        if peer is not None:
            peer.infos.pop(region_id, None)
            gone = TransferRefused(f"region {region_id} of agent {peer.name} was deregistered there")
            await self._running.end_remote(peer, region_id, gone)
            for route in peer.routes.values():
                if not isinstance(route.channel, Storage):
                    route.channel.forget(region_id)

    def _users(self, peer: Peer, link: AgentLink) -> "list[asyncio.Future[None]]":
        """List what may still use memory of a forgotten peer."""
        lingering = [user for transport in self._transports.values() for user in transport.lingering(link)]
        return [user for user in (*self._running.tasks_of(peer), *lingering) if not user.done()]

    def _at(self, link: AgentLink) -> Peer | None:
        peer = self.by_name.get(link.peer)
        return peer if peer is not None and peer.link is link else None

    def _drop(self, peer: Peer) -> None:
        if self.by_name.get(peer.name) is peer:
            del self.by_name[peer.name]
