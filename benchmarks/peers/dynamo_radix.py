"""NVIDIA Dynamo's prefix index, for `python -m benchmarks router`: run by the Python that has ai-dynamo-runtime.

    dynamo_radix.py SEQUENCES.npz ROUNDS

It takes JSON bytes for events, built beforehand, and lists of ints for lookups. Calls are passed to a
thread of its own, so a lookup after the last event waits until all are applied. On one core passing a call is four times
as fast as between two (86,000 lookups a second against 20,000, measured), so it gets one.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from dynamo._core import RadixTree

EVENT_BLOCKS = 16


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def encoded(event_id: int, data: dict[str, Any]) -> bytes:
    return json.dumps({"event_id": event_id, "data": data, "dp_rank": 0}).encode()


def main(path: str, rounds: int) -> dict[str, Any]:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    with np.load(path) as file:
        workers, hashes = file["workers"].tolist(), file["hashes"].tolist()
    stores, removes = [], []
    held = set()
    for worker, sequence in zip(workers, hashes, strict=True):
        for start in range(0, len(sequence), EVENT_BLOCKS):
            run = sequence[start : start + EVENT_BLOCKS]
            blocks = [{"block_hash": h, "tokens_hash": h} for h in run]
            parent = sequence[start - 1] if start else None
            data = {"stored": {"parent_hash": parent, "start_position": None, "blocks": blocks}}
            stores.append((worker, encoded(len(stores), data)))
            if (worker, run[0]) not in held:  # it does not count copies, and a second removal is an error
                removes.append(
                    (
                        worker,
                        encoded(len(hashes) * 16 + len(stores), {"removed": {"block_hashes": run[::-1]}}),
                    )
                )
            held.update((worker, h) for h in run)
    num_blocks = sum(map(len, hashes))
    num_pairs = len(held)
    num_removed = EVENT_BLOCKS * len(removes)
    del held
    queries = [hashes[i] for i in np.random.default_rng(0).permutation(len(hashes)).tolist()]
    result: dict[str, Any] = {
        name: [] for name in ("lookups_per_s", "stored_blocks_per_s", "removed_blocks_per_s")
    }
    for round_ in range(rounds):
        before_bytes = resident_bytes()
        tree = RadixTree()
        begin = time.perf_counter()
        for worker, event in stores:
            tree.apply_event(worker, event)
        tree.find_matches([1])
        result["stored_blocks_per_s"].append(num_blocks / (time.perf_counter() - begin))
        if round_ == 0:
            result["bytes_per_pair"] = (resident_bytes() - before_bytes) / num_pairs
        begin = time.perf_counter()
        for query in queries:
            tree.find_matches(query)
        result["lookups_per_s"].append(len(queries) / (time.perf_counter() - begin))
        begin = time.perf_counter()
        for worker, event in reversed(removes):  # children go first, or they would be gone with their parent
            tree.apply_event(worker, event)
        tree.find_matches([1])
        result["removed_blocks_per_s"].append(num_removed / (time.perf_counter() - begin))
    return result


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]))))
