"""A process pool for simulations, which ends with this process however that ends."""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from types import FrameType, TracebackType
from typing import Any, Self

from penstock.core import log
from penstock.core.errors import ConfigError

JOBS_MAX = 8
_SIGNALLED = 128


class Processes:
    """A process pool that ignores Ctrl-C; leaving its context ends it, and so does SIGTERM."""

    def __init__(self, jobs: int | None = None) -> None:
        """Create a pool of `jobs` processes, by default one for each core and at most `JOBS_MAX`.

        Raises:
            ConfigError: jobs < 1.
        """
        if jobs is not None and jobs < 1:
            raise ConfigError(f"--jobs: must be >= 1, got {jobs}")
        count = jobs or min(len(os.sched_getaffinity(0)), JOBS_MAX)
        self._count = count
        self._pool = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), _prepare)

    def __enter__(self) -> Self:
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited by the processes started now
        try:
            for _ in range(self._count):
                self._pool.submit(os.getpid)
        finally:
            signal.signal(signal.SIGINT, handler)
        self._on_sigterm = signal.signal(signal.SIGTERM, _exit)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Ended first: a process that finds its pipe closed writes a traceback. Jobs that have not begun then fail, which wakes
        # threads that wait for them; `cancel_futures` of Python 3.11 would leave such threads waiting.
        for child in multiprocessing.active_children():
            child.terminate()
        self._pool.shutdown(wait=False)
        signal.signal(signal.SIGTERM, self._on_sigterm)

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        return self._pool.submit(function, *arguments)


def _exit(number: int, _frame: FrameType | None) -> None:
    """Exit in order, so that no semaphore leaks."""
    sys.exit(_SIGNALLED + number)


def _prepare() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # in a process that was started later
    threading.Thread(target=_end_with_parent, daemon=True).start()
    log.configure("error", process="plan")


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
