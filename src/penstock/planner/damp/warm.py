"""Workers whose samples count."""

from collections.abc import Iterable

from penstock.planner.observe.observation import WorkerView


def warm(workers: Iterable[WorkerView], cold_s: float) -> tuple[WorkerView, ...]:
    """Give the workers ready for at least `cold_s`: the first samples of others show caches that fill and code that compiles."""
    return tuple(worker for worker in workers if worker.ready_s >= cold_s)
