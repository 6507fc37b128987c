"""Counts requests that arrive and requests in flight, limits their number, and cuts each at its deadline."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

from penstock.core.errors import DeadlineExceeded, Overloaded, PenstockError, Unavailable
from penstock.frontend.errors import ReceiveTimeoutError
from penstock.frontend.tenants.usage import Use


@dataclass(slots=True, eq=False)
class Slot:
    """One request: arriving while its body is received, in flight once admitted."""

    arrived: float  # arrived and deadline are event loop time
    deadline: float
    timeout_s: float
    settings: str = "frontend."  # prefix of setting names in error texts
    admitted: bool = False
    media_bytes: int = 0  # that it holds, see `requests/media.py`
    tenant: str = ""
    use: Use | None = None  # of its tenant's limits
    _ending: PenstockError | None = None  # set when ended before the deadline
    _scope: asyncio.Timeout | None = None

    @contextlib.asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """Cancel the block at the deadline.

        Raises:
            ReceiveTimeoutError: the deadline passed before the body was complete.
            DeadlineExceeded: the deadline passed after admission.
            PenstockError: `end` was called with this error.
        """
        try:
            async with asyncio.timeout_at(self.deadline) as self._scope:
                yield
        except TimeoutError as error:
            if self._scope is None or not self._scope.expired():
                raise
            raise self._why_ended() from error
        finally:
            self._scope = None

    def end(self, why: PenstockError) -> None:
        """End the request now with this error."""
        self._ending = why
        self.move_deadline(asyncio.get_running_loop().time())

    def move_deadline(self, deadline: float) -> None:
        """Set another deadline, also for the block of `limit` that runs."""
        self.deadline = deadline
        if self._scope is not None and not self._scope.expired():
            self._scope.reschedule(deadline)

    def _why_ended(self) -> PenstockError:
        if self._ending is not None:
            return self._ending
        if not self.admitted:
            return ReceiveTimeoutError(
                f"the body had not come whole {self.timeout_s:g} s after the headers; send it faster, or raise "
                f"{self.settings}receive.timeout_s"
            )
        return DeadlineExceeded(
            f"the request took longer than {self.timeout_s:g} s; ask for fewer tokens, or raise "
            "frontend.request_timeout_s"
        )


class Admission:
    """Counts and limits requests. One event loop owns it."""

    def __init__(
        self,
        *,
        inflight_max: int,
        request_timeout_s: float,
        receive_timeout_s: float,
        retry_after_s: Callable[[], float],
    ) -> None:
        self._inflight_max = inflight_max
        self._timeout_s = request_timeout_s
        self._receive_timeout_s = receive_timeout_s
        self._retry_after_s = retry_after_s
        self._slots: set[Slot] = set()
        self._inflight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._patience: asyncio.Timeout | None = None

    @property
    def inflight(self) -> int:
        """Requests admitted and not ended."""
        return self._inflight

    @contextlib.contextmanager
    def arrive(self) -> Iterator[Slot]:
        """Track a request until it has ended. It does not count against `inflight_max` while its body arrives."""
        now = asyncio.get_running_loop().time()
        slot = Slot(now, now + self._receive_timeout_s, self._receive_timeout_s)
        self._slots.add(slot)
        self._idle.clear()
        try:
            yield slot
        finally:
            self._slots.discard(slot)
            self._inflight -= slot.admitted
            if not self._slots:
                self._idle.set()

    def admit(self, slot: Slot) -> None:
        """Count a request as in flight and start its `request_timeout_s`.

        Raises:
            Overloaded: `inflight_max` requests are in flight.
        """
        if self._inflight >= self._inflight_max:
            raise Overloaded(
                f"{self._inflight} requests are under way, as many as this frontend takes (frontend.inflight_max); try again later",
                retry_after_s=self._retry_after_s(),
            )
        self._inflight += 1
        slot.admitted = True
        slot.arrived = asyncio.get_running_loop().time()
        slot.timeout_s = self._timeout_s
        slot.move_deadline(slot.arrived + self._timeout_s)

    async def drain(self, timeout_s: float) -> int:
        """Wait until no request is left, and end the remaining ones after `timeout_s` seconds.

        Returns:
            Number of requests ended.
        """
        try:
            async with asyncio.timeout(timeout_s) as self._patience:
                await self._idle.wait()
        except TimeoutError:
            slots = list(self._slots)
            for slot in slots:
                slot.end(Unavailable("the server is shutting down; try again"))
            return len(slots)
        finally:
            self._patience = None
        return 0

    def hurry(self) -> None:
        """Make a running `drain` stop waiting."""
        if self._patience is not None and not self._patience.expired():
            self._patience.reschedule(asyncio.get_running_loop().time())
