"""What transports have in common that uses memory only while their moves run, or that say nothing over links."""

import asyncio
import socket
from collections.abc import Collection

from penstock.core.errors import PenstockError, ProtocolError, TransferRefused
from penstock.seams import Link


class ContainedTransport:
    """The part of `seams.Transport` about memory that is used by others, for transports whose own side always moves the bytes."""

    def exposed_to(self, link: Link) -> Collection[int]:
        del link
        return ()

    def lingering(self, user: Link | int) -> Collection["asyncio.Future[None]"]:
        del user
        return ()


class QuietTransport(ContainedTransport):
    """The part of `seams.Transport` about messages, for transports without any."""

    name: str
    setup_s = 0.0

    def receive(self, link: Link, payload: bytes) -> None:
        raise ProtocolError(
            f"agent {link.peer}: {len(payload)} bytes for transport {self.name}, which says nothing to peers"
        )

    def accept(self, link: Link, stream: socket.socket) -> None:
        stream.close()
        raise TransferRefused(f"agent {link.peer}: transport {self.name} uses no streams")

    def lost(self, link: Link, error: PenstockError) -> None:
        """Do nothing: the agent ends what is under way."""
