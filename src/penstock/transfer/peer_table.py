"""The connected peers of an agent, each with the transports that reach it."""

import asyncio
from collections.abc import Mapping
from weakref import WeakValueDictionary

from penstock.core.errors import PeerLost, TransferError, TransferRefused
from penstock.seams import Storage, Transport
from penstock.transfer.link.connections import Connections
from penstock.transfer.link.frames import AgentMetadata
from penstock.transfer.link.links import AgentLink
from penstock.transfer.regions.quarantine import call_after
from penstock.transfer.requests.handles import RunningTransfers
from penstock.transfer.requests.peer import Peer
from penstock.transfer.requests.routes import Route


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
