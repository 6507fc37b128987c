"""Three hosts in three places: network namespaces, with a bad cable between each two of them."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import combinations

from tests.support.cable import BadCable, ip


class Side(BadCable):
    """A cable between two namespaces that are there already."""

    def __init__(self, names: tuple[str, str], number: int) -> None:
        super().__init__()
        self.names = names
        tag = f"{os.getpid()}{number}"
        self.cards = (f"psa{tag}", f"psb{tag}")
        self.addresses = (f"10.213.{80 + number}.1", f"10.213.{80 + number}.2")
        self._middle = f"penstock-{tag}-m"
        self._inner = (f"pma{tag}", f"pmb{tag}")

    def lay(self) -> None:
        self._connect()
        for name, card, address in zip(self.names, self.cards, self.addresses, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", card)
            ip("-n", name, "link", "set", card, "up")


class Triangle:
    """Three namespaces; `address(a, b)` is where host `a` finds host `b`."""

    def __init__(self) -> None:
        self.names = tuple(f"penstock-{os.getpid()}-r{number}" for number in range(3))
        self.sides = {
            (a, b): Side((self.names[a], self.names[b]), number)
            for number, (a, b) in enumerate(combinations(range(3), 2))
        }

    def address(self, one: int, other: int) -> str:
        side = self.sides[min(one, other), max(one, other)]
        return side.addresses[int(other > one)]

    def carry(self, one: int, other: int, *, delay_s: float, cut_from: int | None = None) -> None:
        """Set how frames of two hosts are carried; those of `cut_from` do not arrive."""
        side = self.sides[min(one, other), max(one, other)]
        side.carry(delay_s=delay_s, cut=None if cut_from is None else int(cut_from == max(one, other)))


@contextmanager
def triangle() -> Iterator[Triangle]:
    made = Triangle()
    with ExitStack() as stack:
        for name in made.names:
            ip("netns", "add", name)
            stack.callback(_delete, name)
            ip("-n", name, "link", "set", "lo", "up")
        for side in made.sides.values():
            stack.callback(side.remove)
            side.lay()
        yield made


def _delete(name: str) -> None:
    with contextlib.suppress(subprocess.CalledProcessError):
        ip("netns", "delete", name)
