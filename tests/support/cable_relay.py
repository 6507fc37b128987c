"""Carries frames between two network cards, as slowly and badly as it is told: `python cable_relay.py CARD CARD`.

It does what netem does, which not every kernel has. Each line of its input is JSON: `delay_s` and `loss` of each direction, and
`cut`, which of the two directions carry nothing. `forget` drops connections without a word, as a NAT does that loses its table:
all until now whose first bytes have its text. It answers each with a line.
"""

import heapq
import json
import os
import random
import select
import socket
import sys
import time
from itertools import count
from typing import Any

_SOL_PACKET, _IGNORE_OUTGOING, _VNET_HEADER = 263, 23, 15
_FRAME_BYTES_MAX = 1 << 17
_FRAMES_MAX = 20_000  # on their way
_IP = 10 + 14  # where a packet begins in a frame, behind what says what is still to do
_BEGIN_BYTES = 4096
Connection = frozenset[tuple[bytes, bytes]]
"""Address and port of both ends."""


def _open(card: str) -> socket.socket:
    """Open a card's frames. Their headers say what the other card still has to do: checksums, and cutting long ones."""
    made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    made.setsockopt(_SOL_PACKET, _VNET_HEADER, 1)
    made.setsockopt(_SOL_PACKET, _IGNORE_OUTGOING, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
    made.bind((card, 0))
    made.setblocking(False)
    return made


class Connections:
    """TCP connections over IPv4, and those of them that are forgotten."""

    def __init__(self) -> None:
        self._begins: dict[Connection, bytes] = {}
        self._forgotten: set[Connection] = set()

    def forget(self, text: str) -> None:
        """Drop those whose first bytes have a text."""
        self._forgotten |= {each for each, begin in self._begins.items() if text.encode() in begin}

    def carries(self, frame: bytes) -> bool:
        """Note a frame; False where it is of a connection that is forgotten."""
        packet = frame[_IP:]
        if frame[_IP - 2 : _IP] != b"\x08\x00" or packet[9] != socket.IPPROTO_TCP:
            return True
        segment = packet[4 * (packet[0] & 15) :]
        connection = frozenset({(packet[12:16], segment[:2]), (packet[16:20], segment[2:4])})
        begin = self._begins.get(connection, b"")
        if len(begin) < _BEGIN_BYTES:
            self._begins[connection] = begin + segment[4 * (segment[12] >> 4) :][:_BEGIN_BYTES]
        return connection not in self._forgotten


def relay(cards: tuple[str, str]) -> None:
    """Carry frames until the input ends."""
    ends = [_open(card) for card in cards]
    rng, numbers, connections = random.Random(1), count(), Connections()
    terms: dict[str, Any] = {"delay_s": 0.0, "loss": 0.0, "cut": [False, False]}
    flight: list[tuple[float, int, int, bytes]] = []
    poller = select.epoll()
    for end in (*ends, sys.stdin):
        poller.register(end.fileno(), select.EPOLLIN)
    while True:
        timeout_s = max(0.0, flight[0][0] - time.monotonic()) if flight else None
        for fileno, _ in poller.poll(timeout_s):
            if fileno == sys.stdin.fileno():
                line = sys.stdin.readline()
                if not line:
                    return
                terms = json.loads(line)
                if terms["forget"] is not None:
                    connections.forget(terms["forget"])
                print("done", flush=True)
                continue
            source = next(at for at, end in enumerate(ends) if end.fileno() == fileno)
            frame = ends[source].recv(_FRAME_BYTES_MAX)
            is_lost = terms["cut"][source] or rng.random() < terms["loss"] or len(flight) >= _FRAMES_MAX
            is_lost |= not connections.carries(frame)
            if not is_lost:
                heapq.heappush(
                    flight, (time.monotonic() + terms["delay_s"], next(numbers), 1 - source, frame)
                )
        while flight and flight[0][0] <= time.monotonic():
            _, _, target, frame = heapq.heappop(flight)
            try:
                ends[target].send(frame)
            except OSError as error:  # the card is down, or its queue full: a frame is lost
                print(os.strerror(error.errno or 0), file=sys.stderr)


if __name__ == "__main__":
    relay((sys.argv[1], sys.argv[2]))
