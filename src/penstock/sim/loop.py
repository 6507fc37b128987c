"""Asyncio on virtual time: an event loop whose clock jumps to the next timer when no callback is ready.

Runs are reproducible: nothing depends on the machine's clock, threads, sockets or memory addresses.
"""

import asyncio
import contextvars
import random
import types
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Executor
from heapq import heapify, heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, TypeVarTuple, Unpack

from penstock.core.native import native

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


T = TypeVar("T")


def run(main: Callable[[random.Random], Coroutine[Any, Any, T]], seed: int) -> T:
    """Run `main` on a `SimLoop`, with the random generator for all its randomness.

    Raises:
        Deadlock: it waits for something that can never come.
    """
    return run_virtual(main(random.Random(seed)))


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a `SimLoop`: sleeping takes no real time, and the order of callbacks is reproducible.

    Raises:
        Deadlock: it waits for something that can never come.
    """
    with asyncio.Runner(loop_factory=SimLoop) as runner:
        return runner.run(main)


class Deadlock(RuntimeError):  # noqa: N818 - names a state
    """Every task waits and no timer is set."""


class SimTask(asyncio.Task[Any]):
    """A task hashed by its number, since a TaskGroup keeps tasks in a set and cancels them in set order."""

    def __init__(
        self, coro: Generator[Any, None, Any] | Coroutine[Any, Any, Any], *, loop: "SimLoop", **kwargs: Any
    ) -> None:
        self.number = next(loop.task_numbers)
        super().__init__(coro, loop=loop, **kwargs)

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return self is other


class SimLoop(EventQueue, asyncio.BaseEventLoop):  # type: ignore[misc]
    """The event loop of one simulation. No threads and no sockets; `run_in_executor` calls the function at once."""

    def __init__(self) -> None:
        super().__init__()
        self.task_numbers = count(1)
        self.set_task_factory(_make_task)

    call_soon_threadsafe = EventQueue.call_soon  # type: ignore[assignment]

    def stop(self) -> None:
        super().stop()
        self.stop_iterations()

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> asyncio.Future[T]:
        del executor
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - passed to the caller by the future
            future.set_exception(error)
        return future

    def waiting(self) -> list[str]:
        """Describe where each unfinished task waits, oldest first."""
        tasks = [task for task in asyncio.all_tasks(self) if isinstance(task, SimTask)]
        return [_describe(task) for task in sorted(tasks, key=lambda task: task.number)]

    def close(self) -> None:
        super().close()
        self.forget_calls()

    def _run_once(self) -> None:
        """Run all iterations until the loop is stopped."""
        self.run_iterations()

    def _stuck(self) -> NoReturn:
        where = "\n  ".join(self.waiting()) or "nothing"
        raise Deadlock(f"every task waits and no timer is set, at {self.time():g} s:\n  {where}")

    def _failed(self, callback: Callable[..., object], error: BaseException) -> None:
        self.call_exception_handler({"message": f"Exception in callback {callback!r}", "exception": error})


def _make_task(
    loop: asyncio.AbstractEventLoop, coro: Generator[Any, None, Any] | Coroutine[Any, Any, Any], **kwargs: Any
) -> SimTask:
    assert isinstance(loop, SimLoop)
    return SimTask(coro, loop=loop, **kwargs)


def _describe(task: SimTask) -> str:
    """Format a task's name and the innermost line at which it waits."""
    frame: types.FrameType | None = None
    awaited: Any = task.get_coro()
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None) or frame
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
    if frame is None:
        return task.get_name()
    code = frame.f_code
    return f"{task.get_name()}: {code.co_filename.rpartition('/')[2]}:{frame.f_lineno} in {code.co_qualname}"
