"""The event queue of a loop on virtual time: ready callbacks, timers, and a clock that jumps to the next timer."""

import contextvars
from collections import deque
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Any, NoReturn, TypeVarTuple, Unpack

from penstock.core.native import native

__all__ = ["EventQueue", "EventQueuePython"]

Ts = TypeVarTuple("Ts")

_CANCELLED_MAX = 100
"""Cancelled timers always kept; beyond this they are dropped once they outnumber the live ones."""


class _Handle(list[Any]):
    """Handle of `call_soon` and `call_at`: [when_s, number, callback, args, context, event queue of a timer].

    It is a list, so that a heap compares times and numbers without calling Python: half of a timer's cost. Timers of one
    time run in the order in which they were set.
    """

    __slots__ = ()

    def cancel(self) -> None:
        if self[2] is not None:
            self[2] = None
            self[3] = ()
            if self[5] is not None:
                self[5].note_cancelled()

    def cancelled(self) -> bool:
        """Tell whether it was cancelled or has run."""
        return self[2] is None

    def when(self) -> float:
        when_s: float = self[0]
        return when_s


class EventQueuePython:
    """Runs callbacks in iterations; a subclass handles an empty queue (`_stuck`) and errors (`_failed`).

    Each callback runs in its context, by default a copy of the caller's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cancelled_timers = 0
        """Cancelled timers still in the heap."""
        self._now_s = 0.0
        self._stops = False
        self._due: deque[_Handle] = deque()
        self._timers: list[_Handle] = []
        self._timer_numbers = count()

    @property
    def num_timers(self) -> int:
        """Count the timers in the heap, including cancelled ones."""
        return len(self._timers)

    def time(self) -> float:
        """Give the virtual time in seconds."""
        return self._now_s

    def call_soon(
        self,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> _Handle:
        """Run the callback in the next iteration."""
        handle = _Handle((0.0, 0, callback, args, context or contextvars.copy_context(), None))
        self._due.append(handle)
        return handle

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> _Handle:
        """Run the callback at a virtual time."""
        handle = _Handle(
            (when, next(self._timer_numbers), callback, args, context or contextvars.copy_context(), self)
        )
        heappush(self._timers, handle)
        return handle

    def call_later(
        self,
        delay: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> _Handle:
        """Run the callback after `delay` virtual seconds."""
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def run_iterations(self) -> None:
        """Run iterations until `stop_iterations`; an iteration runs the ready callbacks, or advances the clock to the next timer."""
        due, timers = self._due, self._timers
        while True:
            if not (due or timers):
                self._stuck()
            if not due:
                self._now_s = max(self._now_s, timers[0][0])
            now_s = self._now_s
            while timers and timers[0][0] <= now_s:
                handle = heappop(timers)
                handle[5] = None
                if handle[2] is None:
                    self.cancelled_timers -= 1
                else:
                    due.append(handle)
            for _ in range(len(due)):  # callbacks they add run in the next iteration
                if not due:
                    break  # forget_calls was called
                handle = due.popleft()
                callback, args = handle[2], handle[3]
                if callback is None:
                    continue
                handle[2], handle[3] = None, ()
                try:
                    handle[4].run(callback, *args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:  # noqa: BLE001 - no caller could catch it
                    self._failed(callback, error)
            if self._stops:
                self._stops = False
                return

    def stop_iterations(self) -> None:
        """Make `run_iterations` return after this iteration, or after its first one if it does not run."""
        self._stops = True

    def forget_calls(self) -> None:
        """Drop all ready callbacks and timers."""
        for handle in self._timers:
            handle[5] = None
        self._due.clear()
        self._timers.clear()
        self.cancelled_timers = 0

    def note_cancelled(self) -> None:
        """Count a cancelled timer; drops cancelled timers once there are too many."""
        self.cancelled_timers += 1
        timers = self._timers
        if self.cancelled_timers > _CANCELLED_MAX and 2 * self.cancelled_timers > len(timers):
            timers[:] = [timer for timer in timers if timer[2] is not None]
            heapify(timers)
            self.cancelled_timers = 0

    def _stuck(self) -> NoReturn:
        """Raise the error of an empty queue."""
        raise NotImplementedError

    def _failed(self, callback: Callable[..., object], error: BaseException) -> None:
        """Handle an error raised by a callback."""
        raise NotImplementedError


if TYPE_CHECKING or native is None:  # noqa: SIM108 - mypy needs the branch
    EventQueue = EventQueuePython
else:
    EventQueue = native.EventQueue
