"""Counts requests that arrive and requests in flight, limits their number, and cuts each at its deadline."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import Self

from penstock.core.errors import DeadlineExceeded, Overloaded, PenstockError, Unavailable
from penstock.frontend.errors import ReceiveTimeoutError
from penstock.frontend.limits.tenants import RequestUse

_RESOLUTION_S = 1e-3
"""Timers of uvloop may fire so much before their time."""


@dataclass(slots=True, eq=False)
class RequestSlot:
    """One request: arriving while its body is received, in flight once admitted. Entered, it is left at the block's end."""

    arrived: float  # arrived and deadline are event loop time
    deadline: float
    timeout_s: float
    settings: str = "frontend."  # prefix of setting names in error texts
    admitted: bool = False
    media_bytes: int = 0  # that it holds, see `requests/media.py`
    tenant: str = ""
    use: RequestUse | None = None  # of its tenant's limits
    leave: "Callable[[RequestSlot], None] | None" = None  # called when it has ended
    _ending: PenstockError | None = None  # set when ended before the deadline
    _limit: "_Limit | None" = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.leave is not None:
            self.leave(self)

    def limit(self) -> "_Limit":
        """Cancel the block at the deadline.

        Raises:
            ReceiveTimeoutError: the deadline passed before the body was complete.
            DeadlineExceeded: the deadline passed after admission.
            PenstockError: `end` was called with this error.
        """
        return _Limit(self)

    def end(self, why: PenstockError) -> None:
        """End the request now with this error."""
        self._ending = why
        self.move_deadline(asyncio.get_running_loop().time())

    def move_deadline(self, deadline: float) -> None:
        """Set another deadline, also for the block of `limit` that runs."""
        self.deadline = deadline
        if self._limit is not None:
            self._limit.moved()

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


class _Limit:
    """Cancels the task that runs its block at the slot's deadline, as `asyncio.timeout` would in three times the time.

    The timer stays where it is when the deadline moves away, as it does once the body is there, and is set again when it fires.
    """

    __slots__ = ("_cancelling", "_has_expired", "_loop", "_slot", "_task", "_timer", "_timer_s")

    def __init__(self, slot: RequestSlot) -> None:
        self._slot = slot
        self._has_expired = False

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "a request has a task"
        self._task, self._cancelling, self._loop = task, task.cancelling(), task.get_loop()
        self._slot._limit = self
        self._set_timer()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._slot._limit = None
        self._timer.cancel()
        is_ours = self._has_expired and self._task.uncancel() <= self._cancelling
        if is_ours and kind is not None and issubclass(kind, asyncio.CancelledError):
            raise self._slot._why_ended() from error

    def moved(self) -> None:
        """Take the slot's new deadline."""
        if not self._has_expired and self._slot.deadline < self._timer_s:
            self._timer.cancel()
            self._set_timer()

    def _set_timer(self) -> None:
        self._timer_s = self._slot.deadline
        self._timer = self._loop.call_at(self._timer_s, self._check)

    def _check(self) -> None:
        if self._slot.deadline > self._loop.time() + _RESOLUTION_S:
            self._set_timer()
            return
        self._has_expired = True
        self._task.cancel()


class RequestAdmission:
    """Counts and limits requests. One event loop owns it."""

    def __init__(
        self,
        *,
        inflight_max: int,
        request_timeout_s: float,
        receive_timeout_s: float,
        retry_after_s: Callable[[], float],
        on_left: Callable[[RequestSlot], None] = lambda _: None,
    ) -> None:
        """Admit at most `inflight_max` requests; `on_left` is called with each slot as it ends."""
        self._inflight_max = inflight_max
        self._timeout_s = request_timeout_s
        self._receive_timeout_s = receive_timeout_s
        self._retry_after_s = retry_after_s
        self._on_left = on_left
        self._slots: set[RequestSlot] = set()
        self._inflight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._patience: asyncio.Timeout | None = None

    @cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        """The loop that owns it, asked for once: asking takes a system call, half a microsecond."""
        return asyncio.get_running_loop()

    @property
    def inflight(self) -> int:
        """Requests admitted and not ended."""
        return self._inflight

    def arrive(self) -> RequestSlot:
        """Track a request until its slot is left. It does not count against `inflight_max` while its body arrives."""
        now = self._loop.time()
        slot = RequestSlot(now, now + self._receive_timeout_s, self._receive_timeout_s, leave=self._left)
        self._slots.add(slot)
        self._idle.clear()
        return slot

    def admit(self, slot: RequestSlot) -> None:
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
        slot.arrived = self._loop.time()
        slot.timeout_s = self._timeout_s
        slot.move_deadline(slot.arrived + self._timeout_s)

    def _left(self, slot: RequestSlot) -> None:
        try:
            self._on_left(slot)
        finally:
            self._slots.discard(slot)
            self._inflight -= slot.admitted
            if not self._slots:
                self._idle.set()

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
