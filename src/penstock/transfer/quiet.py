"""What a transport does with a link that it says nothing over."""

import socket

from penstock.core.errors import PenstockError, ProtocolError, TransferRefused
from penstock.seams import Link


class QuietTransport:
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
