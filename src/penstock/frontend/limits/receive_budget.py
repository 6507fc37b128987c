"""The receive budget: how many bytes of received requests may wait to be encoded, over all connections.

A client that sends large bodies and never finishes them must not block others: when the budget is used up, the
largest unfinished body is dropped, so that smaller requests are still served.
"""

from collections.abc import Callable
from types import TracebackType
from typing import Self

from penstock.core.errors import Overloaded
from penstock.frontend.limits.receive_metrics import ReceiveMetrics

_RETRY_AFTER_S = 1.0


class Received:
    """The bytes of one request or connection in the budget. Entered, they are released at the block's end."""

    __slots__ = ("_budget", "_drop", "size_bytes")

    def __init__(self, budget: "ReceiveBudget", drop: Callable[[Overloaded], None]) -> None:
        self._budget = budget
        self._drop = drop
        self.size_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def take(self, size_bytes: int) -> None:
        """Count received bytes.

        Raises:
            Overloaded: the budget is used up and no unfinished body is larger.
        """
        if not self.size_bytes:
            self._budget.unfinished.add(self)
        self.size_bytes += size_bytes
        self._budget.change(size_bytes)
        self._budget.reclaim(self)

    def settle(self) -> None:
        """Mark the body as complete: it can no longer be dropped for others."""
        self._budget.unfinished.discard(self)

    def release(self) -> None:
        """Return its bytes to the budget. Safe twice."""
        self._budget.unfinished.discard(self)
        self._budget.change(-self.size_bytes)
        self.size_bytes = 0

    def drop(self, why: Overloaded) -> None:
        self.release()
        self._drop(why)


class ReceiveBudget:
    """The budget of all connections of a process. One event loop owns it."""

    def __init__(self, bytes_max: int, metrics: ReceiveMetrics, *, settings: str = "frontend.") -> None:
        """Set the budget; `settings` is the prefix of setting names in error texts."""
        self.unfinished: set[Received] = set()
        self.size_bytes = 0
        self._bytes_max = bytes_max
        self._metrics = metrics
        self.settings = settings

    def hold(self, drop: Callable[[Overloaded], None]) -> Received:
        """Count a request's bytes until the block ends; `drop` is called if the request is dropped for others."""
        return Received(self, drop)

    def change(self, size_bytes: int) -> None:
        if size_bytes:
            self.size_bytes += size_bytes
            self._metrics.received(size_bytes)

    def reclaim(self, asking: Received) -> None:
        """Drop the largest unfinished bodies until the budget suffices.

        Raises:
            Overloaded: `asking` itself is the largest.
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
