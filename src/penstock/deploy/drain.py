"""How long the processes of a host may take to end, by the graph."""

from penstock.graph import Graph

_KILL_AFTER_S = 5.0
"""Grace beyond a process's own drain timeout."""


def frontend_drain_s(graph: Graph) -> float:
    """Give the seconds that a frontend may take from SIGTERM to its end."""
    return graph.frontend.drain_timeout_s + _KILL_AFTER_S


def worker_drain_s(graph: Graph) -> float:
    """Give the seconds that a worker may take from SIGTERM to its end."""
    return graph.worker.drain_timeout_s + graph.supervision.close_timeout_s + _KILL_AFTER_S
