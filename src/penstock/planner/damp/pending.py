"""Workers that count, and workers whose samples count."""

from collections.abc import Iterable, Mapping

from penstock.planner.observe.observation import WorkerView


def counted(ready: int, pending_since_s: Mapping[str, float], now_s: float, deadline_s: float) -> int:
    """Count ready workers and those that began to start less than `deadline_s` ago."""
    return ready + sum(now_s - since_s < deadline_s for since_s in pending_since_s.values())


def warm(workers: Iterable[WorkerView], cold_s: float) -> tuple[WorkerView, ...]:
    """Give the workers ready for at least `cold_s`: the first samples of others show caches that fill and code that compiles."""
    return tuple(worker for worker in workers if worker.ready_s >= cold_s)
