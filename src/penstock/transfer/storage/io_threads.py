"""Threads for blocking reads and writes, shared fairly by all running jobs.

A job is many steps. A free thread takes the next step of the next job in turn, so a short job does not wait for a long one.
"""

import asyncio
import contextlib
import mmap
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np


class Bounce:
    """Aligned memory of one thread, for I/O of memory that is not aligned.

    Attributes:
        view: all of it.
        address: of its first byte.
    """

    def __init__(self, size_bytes: int) -> None:
        """Reserve address space; unused pages take no memory."""
        self._mapping = mmap.mmap(-1, size_bytes)
        self.view = memoryview(self._mapping)
        self.address: int = np.frombuffer(self._mapping, np.uint8).ctypes.data


@dataclass(slots=True, eq=False)
class Job:
    """A running job. `done` is set, without an exception, once no thread runs a step of it; `error` is its first error."""

    do: Callable[[int, Bounce], None]
    steps: int
    done: "asyncio.Future[None]"
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    taken: int = 0
    running: int = 0
    error: Exception | None = None


class IoThreads:
    """Runs the steps of jobs. `start` and `stop` are called from the event loop."""

    def __init__(self, threads: int, bounce_bytes: int, name: str) -> None:
        """Begin without threads; the first job starts them."""
        self._size = threads
        self._bounce_bytes = bounce_bytes
        self._name = name
        self._threads: list[threading.Thread] = []
        self._jobs: deque[Job] = deque()  # those with steps that nobody took
        self._changed = threading.Condition()
        self._waiting = 0  # threads without a step
        self._is_closed = False

    def start(self, do: Callable[[int, Bounce], None], steps: int) -> Job:
        """Call `do(i, bounce)` for every i below `steps`, in any order, until one fails."""
        job = Job(do, steps, asyncio.get_running_loop().create_future())
        if steps == 0:
            job.done.set_result(None)
            return job
        with self._changed:
            wanted = len(self._threads) + sum(job.steps - job.taken for job in self._jobs) + steps
            wanted -= self._waiting
        while len(self._threads) < min(self._size, wanted):
            thread = threading.Thread(
                target=self._run, name=f"{self._name}-{len(self._threads)}", daemon=True
            )
            thread.start()
            self._threads.append(thread)
        with self._changed:
            self._jobs.append(job)
            self._changed.notify(min(self._size, steps))
        return job

    def stop(self, job: Job, error: Exception | None = None) -> None:
        """Start no further step; running steps come to their end."""
        with self._changed:
            self._stop(job, error)
            if job.running == 0 and not job.done.done():
                job.done.set_result(None)

    async def finish(self, job: Job) -> None:
        """Wait for a job. A cancellation stops it, and is raised once no thread runs a step of it.

        Raises:
            TransferError: a step failed, or it was stopped with this error.
        """
        cancelled: asyncio.CancelledError | None = None
        while not job.done.done():
            try:
                await asyncio.shield(job.done)
            except asyncio.CancelledError as error:  # the kernel may still be at this memory: wait on
                cancelled = error
                self.stop(job)
        if cancelled is not None:
            raise cancelled
        if job.error is not None:
            raise job.error

    def close(self) -> None:
        """End each thread after its current step. Does not wait, since a thread may hang in the kernel."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._threads.clear()

    def _run(self) -> None:
        bounce = Bounce(self._bounce_bytes)
        while (step := self._take()) is not None:
            job, index = step
            error: Exception | None = None
            try:
                job.do(index, bounce)
            except Exception as failure:  # noqa: BLE001 - `finish` raises it
                error = failure
            self._give_back(job, error)

    def _take(self) -> tuple[Job, int] | None:
        with self._changed:
            while not self._jobs:
                if self._is_closed:
                    return None
                self._waiting += 1
                self._changed.wait()
                self._waiting -= 1
            job = self._jobs[0]
            index = job.taken
            job.taken += 1
            job.running += 1
            if job.taken == job.steps:
                self._jobs.popleft()
            else:
                self._jobs.rotate(-1)
            return job, index

    def _give_back(self, job: Job, error: Exception | None) -> None:
        with self._changed:
            job.running -= 1
            if error is not None:
                self._stop(job, error)
            if job.running or job.taken < job.steps:
                return
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            job.loop.call_soon_threadsafe(_set_done, job)

    def _stop(self, job: Job, error: Exception | None) -> None:
        if job.error is None:
            job.error = error
        if job.taken < job.steps:
            job.taken = job.steps
            self._jobs.remove(job)


def _set_done(job: Job) -> None:
    if not job.done.done():
        job.done.set_result(None)
