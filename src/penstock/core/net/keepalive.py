"""TCP sockets that fail within 8 s where the other host no longer answers, as after a cut cable or an entry that a NAT dropped.

Nothing ends such a connection otherwise, and one that only receives, as a watch, would wait for ever.
"""

import socket
from typing import Any

PROBE_S = 2
"""Silence after which the kernel asks whether the other host is there, and the time between two such questions."""
PROBES = 3
"""So many questions without an answer end a connection, or as much time without one to data that was sent."""
AddressInfo = tuple[int | socket.AddressFamily, int | socket.SocketKind, int, str, tuple[Any, ...]]
"""As `socket.getaddrinfo` gives it."""


def keepalive_socket(address: AddressInfo) -> socket.socket:
    """Make a TCP socket that the kernel probes after 2 s of silence, and ends 6 s later without an answer; likewise for data not acknowledged in 6 s."""
    made = socket.socket(address[0], address[1], address[2])
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_S)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_S)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, PROBES * PROBE_S * 1000)
    return made
