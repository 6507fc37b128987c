"""The links of an agent, whichever side opened them, over sockets or within the process."""

import asyncio
import os
import socket
import ssl
from collections.abc import Coroutine
from dataclasses import replace
from itertools import count
from typing import Protocol
from weakref import WeakValueDictionary

from penstock.core.descriptors import Granted
from penstock.core.errors import PeerLost, PenstockError, ProtocolError, TransferRefused
from penstock.core.listening import Address
from penstock.core.log import get_logger
from penstock.seams import Transport
from penstock.transfer.config import IN_PROCESS, SAME_HOST, TransferConfig
from penstock.transfer.link.frames import AgentMetadata
from penstock.transfer.link.grants import GRANTS, GrantRequest, Grants
from penstock.transfer.link.handshake import ClientHandshake, Identity, ServerHandshake
from penstock.transfer.link.links import AgentLink, MemoryLink, SocketLink
from penstock.transfer.link.listener import Endpoint, Listener

_log = get_logger()

_here: "WeakValueDictionary[bytes, Connections]" = WeakValueDictionary()
"""The agents of this process that accept links within the process, by token."""


class Exchange(Protocol):
    """The part of the agent that its links use."""

    config: TransferConfig
    identity: Identity
    grants: Grants

    def transport(self, name: str) -> Transport | None: ...

    def notified(self, link: AgentLink, payload: bytes) -> None: ...

    async def withdrawn(self, link: AgentLink, region_id: int) -> None: ...

    def lost(self, link: AgentLink, error: PenstockError) -> None: ...

    def note_departure(self, link: AgentLink) -> bool: ...

    def refused(self, error: PenstockError, peer: str) -> None: ...


class Connections:
    """Opens links, accepts links, and passes their messages to the agent."""

    def __init__(self, agent: Exchange) -> None:
        """Open nothing yet."""
        self.tasks: set[asyncio.Task[None]] = set()
        """Tasks that end with the agent."""
        self._agent = agent
        self._me = agent.identity
        self._links: dict[int, AgentLink] = {}
        self._ids = count(1)
        self._listener = Listener(self._me.token, self, agent.config.connect_timeout_s, self._me.tls)
        self._withdrawals: dict[int, set[AgentLink]] = {}
        self._withdrawn: dict[int, asyncio.Event] = {}
        self._group: asyncio.TaskGroup | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self, addresses: tuple[str, ...], tasks: asyncio.TaskGroup) -> tuple[str, ...]:
        """Listen.

        Returns:
            the addresses with their real ports.

        Raises:
            ConfigError: an address is in use, or not of this host.
        """
        self._group = tasks
        self._loop = asyncio.get_running_loop()
        on_sockets = tuple(address for address in addresses if address != IN_PROCESS)
        real = [self._advertised(address) for address in self._listener.open(on_sockets, self)]
        if IN_PROCESS in addresses:
            _here[self._me.token] = self
            real.insert(0, IN_PROCESS)
        return tuple(real)

    def _advertised(self, address: str) -> str:
        """Give an address as peers reach it."""
        host = self._agent.config.advertise
        if host is None or address == SAME_HOST:
            return address
        return str(replace(Address.parse(address), host=host))

    def create_task(self, work: Coroutine[object, object, None]) -> "asyncio.Task[None]":
        """Run a task that ends with the agent."""
        assert self._group is not None, "opened"
        task = self._group.create_task(_guarded(work))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        task.add_done_callback(lambda _: work.close())  # cancelled before its first turn it never began
        return task

    def close(self) -> None:
        """Stop listening, and end every link with a goodbye, links that are being opened as well."""
        for link in self._links.values():
            self.link_exposed(link)
        self._loop = None
        _here.pop(self._me.token, None)
        self._listener.close()
        for link in list(self._links.values()):
            link.close(f"agent {self._me.name} closes")

    async def dial(self, found: AgentMetadata) -> AgentLink:
        """Open a link to an agent at the nearest of its addresses that works.

        Raises:
            ProtocolError: it answers, but the secrets or the versions differ.
            PeerLost: no address answers.
        """
        tried: list[str] = []
        same_host = found.host == self._me.host
        for address in sorted(found.addresses, key=_nearness):
            if address == IN_PROCESS:
                other = _here.get(found.token)
                if other is not None and other._loop is self._loop:
                    return self._join(other, found)
            elif address != SAME_HOST or same_host:
                try:
                    return await self._dial(self._endpoint(address, found), found)
                except PeerLost as error:
                    tried.append(error.message)
        where = (
            "; ".join(tried)
            or f"it listens at {', '.join(found.addresses) or 'no address'}, none reachable from here"
        )
        raise PeerLost(f"agent {found.name} cannot be reached: {where}")

    def _endpoint(self, address: str, found: AgentMetadata) -> Endpoint:
        """Find out whether TLS is spoken at an address.

        Raises:
            PeerLost: only one of the two agents has TLS.
        """
        if address == SAME_HOST:
            return Endpoint(address, found.token)
        tls = self._me.tls
        if (tls is not None) != bool(found.certificate):
            has, lacks = (self._me.name, found.name) if tls else (found.name, self._me.name)
            raise PeerLost(
                f"{address}: agent {has} speaks TLS there and nothing else, agent {lacks} has no `tls`; give both the"
                " deployment's certificates"
            )
        return Endpoint(address, found.token, tls, found.certificate)

    def link_to(self, name: str) -> AgentLink:
        """Find the link to an agent, whichever side opened it.

        Raises:
            PeerLost: there is none.
        """
        for link in self._links.values():
            if link.peer == name and link.error is None:
                return link
        raise PeerLost(f"agent {name} is not connected (any more)")

    async def withdraw(self, region_id: int) -> None:
        """Tell all peers that a region is deregistered and wait until none uses it; cut off peers that do not answer in time.

        The quarantine then holds the memory that such a peer may still use.
        """
        asked = {link for link in self._links.values() if not link.initiated and link.error is None}
        if not asked:
            return
        self._withdrawals[region_id] = set(asked)
        done = self._withdrawn[region_id] = asyncio.Event()
        for link in asked:
            link.withdraw(region_id)
        try:
            async with asyncio.timeout(self._agent.config.heartbeat_timeout_s):
                await done.wait()
        except TimeoutError:
            for link in list(self._withdrawals[region_id]):
                self.link_exposed(link)
                link.close(f"it did not let go of region {region_id} within heartbeat_timeout_s")
        finally:
            del self._withdrawals[region_id], self._withdrawn[region_id]
            self._agent.grants.revoke(region_id)

    # -- what links say -------------------------------------------------------------------------------------------

    def link_message(self, link: AgentLink, transport: str, payload: bytes) -> None:
        found = self._agent.transport(transport)
        if found is None:
            _log.warning("transfer_message_skipped", agent=self._me.name, peer=link.peer, transport=transport)
            return
        try:
            found.receive(link, payload)
        except ProtocolError as error:
            self._agent.refused(error, link.peer)
            raise

    def link_notified(self, link: AgentLink, payload: bytes) -> None:
        self._agent.notified(link, payload)

    def link_withdrawn(self, link: AgentLink, region_id: int) -> None:
        self.create_task(self._agent.withdrawn(link, region_id))

    def link_withdrawn_done(self, link: AgentLink, region_id: int) -> None:
        waiting = self._withdrawals.get(region_id)
        if waiting is not None:
            waiting.discard(link)
            if not waiting:
                self._withdrawn[region_id].set()

    async def link_requested(self, link: AgentLink, request: GrantRequest) -> Granted:
        return await self._agent.grants.answer(link, request)

    def link_exposed(self, link: AgentLink) -> bool:
        return not link.initiated and self._agent.note_departure(link)

    def link_lost(self, link: AgentLink, error: PenstockError) -> None:
        self._links = {link_id: known for link_id, known in self._links.items() if known is not link}
        for region_id in list(self._withdrawals):
            self.link_withdrawn_done(link, region_id)
        self._agent.grants.lost(link)
        self._agent.lost(link, error)

    # -- what connects --------------------------------------------------------------------------------------------

    async def link_came(self, connection: socket.socket, tls: ssl.SSLContext | None) -> None:
        """Accept a link, which begins with TLS if there is a context."""
        link = SocketLink(self, self._agent.config, self._me.host, initiated=False)
        link.set_handshake(
            ServerHandshake(
                self._me.proof, self._admit, lambda error: self._agent.refused(error, link.channel.peer)
            )
        )
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: link.channel, connection, ssl=tls
            )
            await asyncio.shield(link.opened)
        except OSError as error:
            if tls is None:
                raise
            raise ProtocolError(f"TLS: {error!r}; give both agents the deployment's certificates") from error
        except PenstockError as error:
            _log.info("transfer_link_ended", agent=self._me.name, error=error.message)
        finally:
            if not link.opened.done():  # too slow
                link.channel.abort("it did not say who it is in time")

    def stream_key(self, link_id: int) -> bytes | None:
        """Give the key that opens streams of this link; None if there is no such link."""
        link = self._links.get(link_id)
        if not isinstance(link, SocketLink) or link.initiated or link.error is not None:
            return None
        return link.stream_key

    def stream_came(self, link_id: int, transport: str, connection: socket.socket) -> None:
        """Take ownership of a stream.

        Raises:
            TransferRefused: the link has ended, or this agent does not have the transport.
        """
        link = self._links.get(link_id)
        if link is None:
            raise TransferRefused(f"a stream of link {link_id}, which has ended")
        if transport == GRANTS:
            self._agent.grants.check_room(link)
            serving = self.create_task(self._agent.grants.serve(link, connection))
            serving.add_done_callback(lambda _: connection.close())  # it may never have begun
            return
        found = self._agent.transport(transport)
        if found is None:
            raise TransferRefused(f"a stream for transport {transport!r}, which this agent does not have")
        found.accept(link, connection)

    def unauthenticated_refused(self, error: PenstockError, where: str) -> None:
        """Count and log a connection that did not authenticate."""
        self._agent.refused(error, where)

    def _admit(self, link: AgentLink) -> int:
        link_id = next(self._ids)
        self._links[link_id] = link
        return link_id

    def _join(self, other: "Connections", found: AgentMetadata) -> AgentLink:
        ours, theirs = MemoryLink.pair((self, self._me.name), (other, found.name), os.getpid())
        self._admit(ours)
        other._admit(theirs)
        return ours

    async def _dial(self, endpoint: Endpoint, found: AgentMetadata) -> AgentLink:
        timeout_s = self._agent.config.connect_timeout_s
        connection = await endpoint.open_link(timeout_s)
        link = SocketLink(self, self._agent.config, self._me.host, initiated=True)
        link.identify(found.name, found.host)
        handshake = ClientHandshake(
            self._me.proof_for(found.token),
            self._me.name,
            self._me.host,
            peer=found.name,
            check_certificate=endpoint.check_certificate,
        )

        async def open_stream(transport: str) -> socket.socket:
            return await endpoint.open_stream(link.link_id, link.stream_key, transport, timeout_s)

        link.set_handshake(handshake, open_stream)
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.get_running_loop().create_connection(
                    lambda: link.channel,
                    sock=connection,
                    ssl=endpoint.tls.client if endpoint.tls else None,
                    server_hostname="" if endpoint.tls else None,
                )
                await asyncio.shield(link.opened)
        except ssl.SSLError as error:
            connection.close()
            raise ProtocolError(
                f"{endpoint.address}: TLS: {error}; give both agents the deployment's certificates"
            ) from error
        except TimeoutError as error:
            link.channel.abort("no answer")
            raise PeerLost(
                f"{endpoint.address}: no answer within {timeout_s:g} s (connect_timeout_s)"
            ) from error
        except BaseException:
            link.channel.abort("given up")
            raise
        if link.error is not None:  # it ended again before this task had its turn
            raise link.error
        if self._loop is None:
            link.close(f"agent {self._me.name} closes")
            raise PeerLost(f"agent {found.name}: agent {self._me.name} closes")
        self._admit(link)
        return link


def _nearness(address: str) -> int:
    """Prefer memory, then unix sockets, where the kernel names the peer's process; then TCP."""
    return (IN_PROCESS, SAME_HOST).index(address) if address in {IN_PROCESS, SAME_HOST} else 2


async def _guarded(work: Coroutine[object, object, None]) -> None:
    """Log an unexpected exception instead of ending the agent's task group."""
    try:
        await work
    except Exception:  # noqa: BLE001 - the fate of the task is owned here
        _log.exception("transfer_task_failed")
