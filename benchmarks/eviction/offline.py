"""The offline bound: Belady's rule with the future known, children before parents.

It maximises the cached blocks. By prefill seconds it is close to the optimum and not the optimum, since deeper blocks
cost more.
"""

import heapq
from collections.abc import Sequence

from penstock.sim.trace import TraceRow

_NEVER = 1 << 60


def replay_offline(rows: Sequence[TraceRow], num_blocks: int) -> list[int]:
    """Give the cached blocks of each request if the block whose next use is farthest goes first."""
    next_uses = _next_uses(rows)
    resident: dict[int, tuple[int, int]] = {}  # next use and depth, as in the heap
    heap: list[tuple[int, int, int]] = []
    hits = []
    for row, uses in zip(rows, next_uses, strict=True):
        held = 0
        while held < len(row.prefix_ids) and row.prefix_ids[held] in resident:
            held += 1
        hits.append(held)
        if len(row.prefix_ids) > num_blocks:
            continue
        current = set(row.prefix_ids)
        for depth, (block, use) in enumerate(zip(row.prefix_ids, uses, strict=True)):
            resident[block] = use, depth
        waiting = []
        while len(resident) > num_blocks:
            use, depth, block = heapq.heappop(heap)
            if resident.get(block) != (-use, -depth):
                continue  # it was used since, or is gone
            if block in current:
                waiting.append((use, depth, block))
            else:
                del resident[block]
        for entry in waiting:
            heapq.heappush(heap, entry)
        for depth, (block, use) in enumerate(zip(row.prefix_ids, uses, strict=True)):
            heapq.heappush(heap, (-use, -depth, block))
    return hits


def _next_uses(rows: Sequence[TraceRow]) -> list[list[int]]:
    """Give, for each request and block, the number of the next request that has the block."""
    seen: dict[int, int] = {}
    found = []
    for number in reversed(range(len(rows))):
        found.append([seen.get(block, _NEVER) for block in rows[number].prefix_ids])
        seen.update(dict.fromkeys(rows[number].prefix_ids, number))
    return found[::-1]
