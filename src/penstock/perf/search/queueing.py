"""Closed-form waiting time of a queue with several servers and constant service time."""

import math


def wait_s(service_s: float, servers: int, busy: float, share: float) -> float:
    """Give a quantile of the waiting time for Poisson arrivals that join the shortest queue.

    Args:
        service_s: constant service time.
        servers: number of servers.
        busy: utilization; from 1 on the result is infinite.
        share: the quantile, such as 0.9.

    Source: Sakasegawa (1977) for the odds of waiting, `busy ** (sqrt(2 (servers + 1)) - 1)`; halved mean for equal
    service (Allen and Cunneen); an exponential tail. Exact to a few percent for one server; joining the shortest of several queues is nearly one
    queue.
    """
    if busy >= 1:
        return math.inf
    waits = busy ** (math.sqrt(2 * (servers + 1)) - 1)
    if waits <= 1 - share:
        return 0.0
    return service_s / (2 * servers * (1 - busy)) * math.log(waits / (1 - share))
