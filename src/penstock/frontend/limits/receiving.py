"""Bytes of requests that have come and are not encoded yet: how many there may be, and who goes if there are more.

A client that sends large bodies and never ends them must not keep others out: when the room is full, the largest
unfinished body gives its bytes back, so that whoever needs less than it is still served.
"""

import contextlib
from collections.abc import Callable, Iterator

from penstock.core.errors import Overloaded
from penstock.frontend.limits.receive_metrics import ReceiveMetrics

_RETRY_AFTER_S = 1.0


class Received:
    """The bytes that one request, or one connection, has here."""

    __slots__ = ("_drop", "_room", "size_bytes")

    def __init__(self, room: "ReceiveRoom", drop: Callable[[Overloaded], None]) -> None:
        self._room = room
        self._drop = drop
        self.size_bytes = 0

    def take(self, size_bytes: int) -> None:
        """Count bytes that came.

        Raises:
            Overloaded: there is no room, and nobody who is unfinished has more.
        """
        if not self.size_bytes:
            self._room.unfinished.add(self)
        self.size_bytes += size_bytes
        self._room.change(size_bytes)
        self._room.make_room(self)

    def settle(self) -> None:
        """It has come whole: it is not given up for others any more."""
        self._room.unfinished.discard(self)

    def release(self) -> None:
        """Its bytes are gone. Safe twice."""
        self._room.unfinished.discard(self)
        self._room.change(-self.size_bytes)
        self.size_bytes = 0

    def drop(self, why: Overloaded) -> None:
        self.release()
        self._drop(why)


class ReceiveRoom:
    """The room for all connections of a process. One event loop owns it."""

    def __init__(self, bytes_max: int, metrics: ReceiveMetrics, *, settings: str = "frontend.") -> None:
        """Prepare; refusals name settings that begin with `settings`."""
        self.unfinished: set[Received] = set()
        self.size_bytes = 0
        self._bytes_max = bytes_max
        self._metrics = metrics
        self.settings = settings

    @contextlib.contextmanager
    def hold(self, drop: Callable[[Overloaded], None]) -> Iterator[Received]:
        """Hold bytes until the block ends; `drop` is told if they are given up before they are settled."""
        received = Received(self, drop)
        try:
            yield received
        finally:
            received.release()

    def change(self, size_bytes: int) -> None:
        if size_bytes:
            self.size_bytes += size_bytes
            self._metrics.received(size_bytes)

    def make_room(self, asking: Received) -> None:
        """Give up the largest unfinished ones, as far as needed.

        Raises:
            Overloaded: that is `asking` itself.
        """
        while self.size_bytes > self._bytes_max:
            largest = max(self.unfinished, key=lambda received: received.size_bytes, default=asking)
            why = Overloaded(
                f"{self.size_bytes} bytes of requests are being received, more than the {self._bytes_max} that there is "
                f"room for, and no unfinished body is larger than this one; try again later, or raise {self.settings}receive.bytes_max",
                retry_after_s=_RETRY_AFTER_S,
            )
            self._metrics.refused_body("room")
            if largest is asking:
                asking.release()
                raise why
            largest.drop(why)
