"""Carries frames between two network cards, as slowly and badly as it is told: `python cable_relay.py CARD CARD`.

It does what netem does, which not every kernel has. Each line of its input is JSON: `delay_s` and `loss` of each direction, and
`cut`, which of the two directions carry nothing. It answers each with a line.
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


def _open(card: str) -> socket.socket:
    """Open a card's frames. Their headers say what the other card still has to do: checksums, and cutting long ones."""
    made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    made.setsockopt(_SOL_PACKET, _VNET_HEADER, 1)
    made.setsockopt(_SOL_PACKET, _IGNORE_OUTGOING, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
    made.bind((card, 0))
    made.setblocking(False)
    return made


def relay(cards: tuple[str, str]) -> None:
    """Carry frames until the input ends."""
    ends = [_open(card) for card in cards]
    rng, numbers = random.Random(1), count()
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
                print("done", flush=True)
                continue
            source = next(at for at, end in enumerate(ends) if end.fileno() == fileno)
            frame = ends[source].recv(_FRAME_BYTES_MAX)
            is_lost = terms["cut"][source] or rng.random() < terms["loss"] or len(flight) >= _FRAMES_MAX
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
