"""How long work waits for one of several servers that each take the same time for it: closed forms, to rank by."""

import math


def wait_s(service_s: float, servers: int, busy: float, share: float) -> float:
    """Give the wait that a share of the arrivals stays below, where they come at random and join the shortest queue.

    Args:
        service_s: what each takes, always the same.
        servers: how many there are.
        busy: share of the time that each of them works; infinity comes out from 1 on.
        share: such as 0.9.

    Source: Sakasegawa (1977) for the odds of waiting, `busy ** (sqrt(2 (servers + 1)) - 1)`; halved mean for equal
    service (Allen and Cunneen); an exponential tail. Exact to a few percent for one server; queues of their own that
    the shortest is chosen of are nearly one queue.
    """
    if busy >= 1:
        return math.inf
    waits = busy ** (math.sqrt(2 * (servers + 1)) - 1)
    if waits <= 1 - share:
        return 0.0
    return service_s / (2 * servers * (1 - busy)) * math.log(waits / (1 - share))
