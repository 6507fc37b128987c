"""Defaults of transports: no messages, no streams, no grants, no exposed memory."""

import asyncio
import socket
from collections.abc import Collection

from penstock.core.descriptors import Granted, Keys
from penstock.core.errors import PenstockError, ProtocolError, TransferRefused
from penstock.seams import Link


class QuietTransport:
    """Defaults of `seams.Transport` for a transport whose owner moves the bytes itself."""

    name: str
    setup_s = 0.0

    def receive(self, link: Link, payload: bytes) -> None:
        raise ProtocolError(
            f"agent {link.peer}: {len(payload)} bytes for transport {self.name}, which says nothing to peers"
        )

    def accept(self, link: Link, stream: socket.socket) -> None:
        stream.close()
        raise TransferRefused(f"agent {link.peer}: transport {self.name} uses no streams")

    async def grant(self, link: Link, keys: Keys, payload: bytes) -> Granted:
        del keys, payload
        raise TransferRefused(f"agent {link.peer}: transport {self.name} grants nothing")

    def exposed_to(self, link: Link) -> Collection[int]:
        del link
        return ()

    def lingering(self, user: Link | int) -> Collection["asyncio.Future[None]"]:
        del user
        return ()

    def lost(self, link: Link, error: PenstockError) -> None:
        """Do nothing: the agent ends what is under way."""
