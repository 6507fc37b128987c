"""Two hosts, as far as sockets can tell: network namespaces with a cable between them, which can be pulled out or be bad.

It needs iproute2 and the right to make namespaces, which root has.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_RELAY = Path(__file__).with_name("cable_relay.py")


class Cable:
    """Two namespaces, and a pair of virtual network cards that connects them."""

    def __init__(self) -> None:
        number = os.getpid()
        self.names = (f"penstock-{number}-a", f"penstock-{number}-b")
        self.cards = (f"psa{number}", f"psb{number}")
        self.addresses = ("10.213.77.1", "10.213.77.2")

    def lay(self) -> None:
        for name in self.names:
            ip("netns", "add", name)
        self._connect()
        for name, card, address in zip(self.names, self.cards, self.addresses, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", card)
            ip("-n", name, "link", "set", card, "up")
            ip("-n", name, "link", "set", "lo", "up")

    def _connect(self) -> None:
        ip("link", "add", self.cards[0], "type", "veth", "peer", "name", self.cards[1])
        for name, card in zip(self.names, self.cards, strict=True):
            ip("link", "set", card, "netns", name)

    def pull(self) -> None:
        ip("-n", self.names[0], "link", "set", self.cards[0], "down")

    def plug_in(self) -> None:
        ip("-n", self.names[0], "link", "set", self.cards[0], "up")

    def remove(self) -> None:
        for name in self.names:
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "delete", name)


class BadCable(Cable):
    """A cable with a relay in the middle, in a namespace of its own, that delays frames, loses them, or drops one direction or connections."""

    def __init__(self) -> None:
        super().__init__()
        number = os.getpid()
        self._middle = f"penstock-{number}-m"
        self._inner = (f"pma{number}", f"pmb{number}")
        self._relay: subprocess.Popen[str] | None = None

    def _connect(self) -> None:
        ip("netns", "add", self._middle)
        for name, card, inner in zip(self.names, self.cards, self._inner, strict=True):
            ip("link", "add", card, "type", "veth", "peer", "name", inner)
            ip("link", "set", card, "netns", name)
            ip("link", "set", inner, "netns", self._middle)
            ip("-n", self._middle, "link", "set", inner, "up")
        self._relay = subprocess.Popen(
            ["ip", "netns", "exec", self._middle, sys.executable, str(_RELAY), *self._inner],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.carry()

    def carry(
        self, *, delay_s: float = 0.0, loss: float = 0.0, cut: int | None = None, forget: str | None = None
    ) -> None:
        """Set how frames are carried from now on.

        Args:
            delay_s: of each direction.
            loss: share of frames lost.
            cut: host whose frames do not arrive, 0 or 1.
            forget: nothing is carried any more, in both directions, of TCP connections until now whose first bytes have this text.
        """
        assert self._relay is not None, "laid"
        assert self._relay.stdin is not None, "a pipe"
        assert self._relay.stdout is not None, "a pipe"
        terms = {"delay_s": delay_s, "loss": loss, "cut": [cut == 0, cut == 1], "forget": forget}
        print(json.dumps(terms), file=self._relay.stdin, flush=True)
        assert self._relay.stdout.readline() == "done\n", "the relay has ended"

    def remove(self) -> None:
        if self._relay is not None:
            self._relay.kill()
            self._relay.communicate()
        super().remove()
        with contextlib.suppress(subprocess.CalledProcessError):
            ip("netns", "delete", self._middle)


def ip(*words: str) -> None:
    """Run the program `ip`."""
    subprocess.run(["ip", *words], check=True)


@contextmanager
def cable() -> Iterator[Cable]:
    made = Cable()
    try:
        made.lay()
        yield made
    finally:
        made.remove()


@contextmanager
def bad_cable() -> Iterator[BadCable]:
    made = BadCable()
    try:
        made.lay()
        yield made
    finally:
        made.remove()
