"""Which requests are under way, how many may be, and when the time of each is up."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

from penstock.core.errors import DeadlineExceeded, Overloaded, Unavailable

_RETRY_AFTER_S = 1.0


@dataclass(slots=True, eq=False)
class Slot:
    """A request's place among those under way."""

    arrived: float  # both in the event loop's time
    deadline: float
    timeout_s: float
    ended: bool = False  # by a shutdown that waits no longer
    _scope: asyncio.Timeout | None = None

    @contextlib.asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """Cut short what runs inside when the time is up.

        Raises:
            DeadlineExceeded: the request's time is up.
            Unavailable: the server shuts down and has waited long enough.
        """
        try:
            async with asyncio.timeout_at(self.deadline) as self._scope:
                yield
        except TimeoutError as error:
            if self._scope is None or not self._scope.expired():
                raise
            if self.ended:
                raise Unavailable("the server is shutting down; try again") from error
            raise DeadlineExceeded(
                f"the request took longer than {self.timeout_s:g} s; ask for fewer tokens, or raise "
                "frontend.request_timeout_s"
            ) from error
        finally:
            self._scope = None

    def end(self) -> None:
        """Let the time be up now."""
        self.ended = True
        self.deadline = now = asyncio.get_running_loop().time()
        if self._scope is not None and not self._scope.expired():
            self._scope.reschedule(now)


class Admission:
    """Counts requests in and out. One event loop owns it."""

    def __init__(self, *, inflight_max: int, request_timeout_s: float) -> None:
        self._inflight_max = inflight_max
        self._timeout_s = request_timeout_s
        self._slots: set[Slot] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._patience: asyncio.Timeout | None = None

    @property
    def inflight(self) -> int:
        return len(self._slots)

    @contextlib.contextmanager
    def admit(self) -> Iterator[Slot]:
        """Hold a slot while a request is under way.

        Raises:
            Overloaded: as many as allowed are.
        """
        if len(self._slots) >= self._inflight_max:
            raise Overloaded(
                f"{len(self._slots)} requests are under way, as many as this frontend takes; try again later",
                retry_after_s=_RETRY_AFTER_S,
            )
        now = asyncio.get_running_loop().time()
        slot = Slot(now, now + self._timeout_s, self._timeout_s)
        self._slots.add(slot)
        self._idle.clear()
        try:
            yield slot
        finally:
            self._slots.discard(slot)
            if not self._slots:
                self._idle.set()

    async def drain(self, timeout_s: float) -> int:
        """Wait until no request is under way, and end those that still are after `timeout_s`.

        Returns:
            How many were ended.
        """
        try:
            async with asyncio.timeout(timeout_s) as self._patience:
                await self._idle.wait()
        except TimeoutError:
            slots = list(self._slots)
            for slot in slots:
                slot.end()
            return len(slots)
        finally:
            self._patience = None
        return 0

    def hurry(self) -> None:
        """Let a `drain` under way wait no longer."""
        if self._patience is not None and not self._patience.expired():
            self._patience.reschedule(asyncio.get_running_loop().time())
