"""How often several routers choose the same worker at once."""

from collections.abc import Sequence

TOGETHER_S = 0.001
"""Decisions within this time do not know of each other: a message each way, and the worker's turn."""


def same_worker_share(sent: Sequence[tuple[float, int, int]]) -> float:
    """Give the share of requests that went to a worker to which another router had sent one within `TOGETHER_S`.

    Args:
        sent: (time, router, worker) of each request, in the order of time.
    """
    last: dict[int, dict[int, float]] = {}  # by worker, when each router last sent there
    together = 0
    for at_s, router, worker in sent:
        times = last.setdefault(worker, {})
        together += any(other != router and at_s - then_s <= TOGETHER_S for other, then_s in times.items())
        times[router] = at_s
    return together / len(sent) if sent else 0.0
