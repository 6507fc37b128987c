"""Runs jobs in processes, each job once."""

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, as_completed
from concurrent.futures.process import BrokenProcessPool
from types import TracebackType
from typing import Protocol, Self, TypeVar

from benchmarks.runner.cache import Cache, Figures
from penstock.core.errors import PenstockError
from penstock.plan.processes import Processes


class Job(Protocol):
    """A computation that can be pickled. Jobs with equal keys have equal figures."""

    @property
    def key(self) -> str: ...

    def __call__(self) -> Figures: ...


J = TypeVar("J", bound=Job)


class Runner:
    """Enter it from the main thread; leaving it ends its processes. `run_many` may be called from several threads."""

    def __init__(self, jobs: int, cache: Cache | None = None) -> None:
        self._processes = Processes(jobs)
        self._cache = Cache(None) if cache is None else cache

    def __enter__(self) -> Self:
        self._processes.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._processes.__exit__(kind, error, trace)

    def knows(self, job: Job) -> bool:
        """Whether the cache has the figures."""
        return self._cache.get(job.key) is not None

    def run(self, job: Job) -> Figures:
        """Run one job, as `run_many` does."""
        return dict(self.run_many([job]))[job]

    def run_many(self, jobs: Iterable[J]) -> Iterator[tuple[J, Figures]]:
        """Yield each job with its figures: first what the cache has, then each job as it ends.

        Raises:
            PenstockError: a job failed, or its process was killed.
        """
        known: list[tuple[J, Figures]] = []
        running: dict[Future[Figures], J] = {}
        for job in jobs:
            figures = self._cache.get(job.key)
            if figures is None:
                running[self._processes.submit(job)] = job
            else:
                known.append((job, figures))
        yield from known
        for future in as_completed(running):
            job = running[future]
            try:
                figures = future.result()
            except BrokenProcessPool as error:
                raise PenstockError(
                    "a process of the bench was killed, perhaps because memory ran out; try fewer --jobs, and the"
                    " same --state to go on"
                ) from error
            self._cache.put(job.key, figures)
            yield job, figures


def default_jobs() -> int:
    """Give the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))
