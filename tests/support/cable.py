"""Two hosts, as far as sockets can tell: network namespaces with a cable between them, which can be pulled out.

It needs iproute2 and the right to make namespaces, which root has.
"""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager


class Cable:
    """Two namespaces, and a pair of virtual network cards that connects them."""

    def __init__(self) -> None:
        number = os.getpid()
        self.names = (f"penstock-{number}-a", f"penstock-{number}-b")
        self.cards = (f"psa{number}", f"psb{number}")
        self.addresses = ("10.213.77.1", "10.213.77.2")

    def lay(self) -> None:
        for name in self.names:
            _ip("netns", "add", name)
        _ip("link", "add", self.cards[0], "type", "veth", "peer", "name", self.cards[1])
        for name, card, address in zip(self.names, self.cards, self.addresses, strict=True):
            _ip("link", "set", card, "netns", name)
            _ip("-n", name, "address", "add", f"{address}/24", "dev", card)
            _ip("-n", name, "link", "set", card, "up")
            _ip("-n", name, "link", "set", "lo", "up")

    def pull(self) -> None:
        _ip("-n", self.names[0], "link", "set", self.cards[0], "down")

    def plug_in(self) -> None:
        _ip("-n", self.names[0], "link", "set", self.cards[0], "up")

    def remove(self) -> None:
        for name in self.names:
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "delete", name)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextmanager
def cable() -> Iterator[Cable]:
    made = Cable()
    try:
        made.lay()
        yield made
    finally:
        made.remove()
