"""A process pool for simulations, which ends with this process however that ends."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from types import TracebackType
from typing import Any, Self

from penstock.core import log
from penstock.core.errors import ConfigError

JOBS_MAX = 8


class Processes:
    """A process pool that ignores Ctrl-C; leaving its context ends it."""

    def __init__(self, jobs: int | None = None) -> None:
        """Create a pool of `jobs` processes, by default one for each core and at most `JOBS_MAX`.

        Raises:
            ConfigError: jobs < 1.
        """
        if jobs is not None and jobs < 1:
            raise ConfigError(f"--jobs: must be >= 1, got {jobs}")
        count = jobs or min(len(os.sched_getaffinity(0)), JOBS_MAX)
        self._pool = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), _prepare)

    def __enter__(self) -> Self:
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited by the processes started now
        try:
            self._pool.submit(os.getpid)
        finally:
            signal.signal(signal.SIGINT, handler)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        for child in multiprocessing.active_children():
            child.terminate()

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        return self._pool.submit(function, *arguments)


def _prepare() -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    log.configure("error", process="plan")


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
