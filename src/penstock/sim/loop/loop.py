"""Asyncio on virtual time: an event loop whose clock jumps to the next timer when no callback is ready.

Runs are reproducible: nothing depends on the machine's clock, threads, sockets or memory addresses.
"""

import asyncio
import random
import types
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Executor
from itertools import count
from typing import Any, NoReturn, TypeVar, TypeVarTuple, Unpack

from penstock.sim.loop.event_queue import EventQueue

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


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
