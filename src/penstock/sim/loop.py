"""Asyncio on virtual time: an event loop whose clock jumps to the next timer whenever nothing else is to be done.

The same coroutines take the same turns in every process: nothing is taken from the machine's clock, its
threads or its sockets, and nothing depends on the order of addresses.
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
from typing import Any, TypeVar, TypeVarTuple, Unpack

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_CANCELLED_MAX = 100
"""So many cancelled timers may always be kept; more only while they are fewer than the others."""


def run(main: Callable[[random.Random], Coroutine[Any, Any, T]], seed: int) -> T:
    """Run `main` on a `SimLoop`, with the generator that all its randomness comes from.

    Raises:
        Deadlock: it waits for something that can never come.
    """
    return run_virtual(main(random.Random(seed)))


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a `SimLoop`: hours of sleeping take no time, and always the same turns.

    Raises:
        Deadlock: it waits for something that can never come.
    """
    with asyncio.Runner(loop_factory=SimLoop) as runner:
        return runner.run(main)


class Deadlock(RuntimeError):  # noqa: N818 - a state, as people name it
    """Every task waits and no timer is set, so that nothing could ever happen again."""


class SimTask(asyncio.Task[Any]):
    """A task that hashes by its number: a TaskGroup keeps its tasks in a set, and cancels them in its order."""

    def __init__(
        self, coro: Generator[Any, None, Any] | Coroutine[Any, Any, Any], *, loop: "SimLoop", **kwargs: Any
    ) -> None:
        self.number = next(loop.task_numbers)
        super().__init__(coro, loop=loop, **kwargs)

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return self is other


class SimHandle(list[Any]):
    """What `call_soon` and `call_at` give: [when_s, number, callback, args, context, its loop while it is a timer].

    A list, so that a heap compares moments and numbers without calling Python: half of a timer's cost. Timers of one
    moment run in the order in which they were set.
    """

    __slots__ = ()

    def cancel(self) -> None:
        if self[2] is not None:
            self[2] = None
            self[3] = ()
            if self[5] is not None:
                self[5].note_cancelled()

    def cancelled(self) -> bool:
        """Say whether it was cancelled, or has run."""
        return self[2] is None

    def when(self) -> float:
        when_s: float = self[0]
        return when_s


class SimLoop(asyncio.BaseEventLoop):
    """The loop of one simulation. No threads and no sockets; `run_in_executor` calls at once, on the spot."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self.task_numbers = count(1)
        self.cancelled_timers = 0
        """Timers that were cancelled and are still kept."""
        self._timers: list[SimHandle] = []
        self._timer_numbers = count()
        super().__init__()
        self._ready: deque[SimHandle] = deque()
        self.set_task_factory(_make_task)

    def time(self) -> float:
        return self._now_s

    def call_soon(  # type: ignore[override]
        self,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> SimHandle:
        handle = SimHandle((0.0, 0, callback, args, context or contextvars.copy_context(), None))
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> SimHandle:
        handle = SimHandle(
            (when, next(self._timer_numbers), callback, args, context or contextvars.copy_context(), self)
        )
        heappush(self._timers, handle)
        return handle

    def call_later(  # type: ignore[override]
        self,
        delay: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> SimHandle:
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> asyncio.Future[T]:
        del executor
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - the caller's, by way of the future
            future.set_exception(error)
        return future

    def waiting(self) -> list[str]:
        """Say of every task that has not ended where it waits, oldest first."""
        tasks = [task for task in asyncio.all_tasks(self) if isinstance(task, SimTask)]
        return [_describe(task) for task in sorted(tasks, key=lambda task: task.number)]

    def close(self) -> None:
        super().close()
        self._timers.clear()

    def _run_once(self) -> None:  # noqa: C901, PLR0912 - calls would take as long as what they do
        """Take turns until the loop is stopped: run what is ready, or else go to the next timer."""
        ready, timers = self._ready, self._timers
        while True:
            if not ready:
                if not timers:
                    raise self._deadlock()
                if timers[0][0] > self._now_s:
                    self._now_s = timers[0][0]
            now_s = self._now_s
            while timers and timers[0][0] <= now_s:
                handle = heappop(timers)
                handle[5] = None
                if handle[2] is None:
                    self.cancelled_timers -= 1
                else:
                    ready.append(handle)
            for _ in range(len(ready)):  # what they make ready is the next turn's
                handle = ready.popleft()
                callback, args = handle[2], handle[3]
                if callback is None:
                    continue
                handle[2] = None
                try:
                    if args:
                        handle[4].run(callback, *args)
                    else:  # most of them, in half the time
                        handle[4].run(callback)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:  # noqa: BLE001 - nobody called it: the loop's handler takes it
                    self.call_exception_handler(
                        {"message": f"Exception in callback {callback!r}", "exception": error}
                    )
            if self._stopping:  # type: ignore[attr-defined]
                return

    def note_cancelled(self) -> None:
        """Count a timer that was cancelled, and forget them all once they are many."""
        self.cancelled_timers += 1
        timers = self._timers
        if self.cancelled_timers > _CANCELLED_MAX and 2 * self.cancelled_timers > len(timers):
            timers[:] = [timer for timer in timers if timer[2] is not None]
            heapify(timers)
            self.cancelled_timers = 0

    def _deadlock(self) -> Deadlock:
        where = "\n  ".join(self.waiting()) or "nothing"
        return Deadlock(f"every task waits and no timer is set, at {self._now_s:g} s:\n  {where}")


def _make_task(
    loop: asyncio.AbstractEventLoop, coro: Generator[Any, None, Any] | Coroutine[Any, Any, Any], **kwargs: Any
) -> SimTask:
    assert isinstance(loop, SimLoop)
    return SimTask(coro, loop=loop, **kwargs)


def _describe(task: SimTask) -> str:
    """Name a task and the innermost line it waits at."""
    frame: types.FrameType | None = None
    awaited: Any = task.get_coro()
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None) or frame
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
    if frame is None:
        return task.get_name()
    code = frame.f_code
    return f"{task.get_name()}: {code.co_filename.rpartition('/')[2]}:{frame.f_lineno} in {code.co_qualname}"
