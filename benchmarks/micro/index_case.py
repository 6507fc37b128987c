"""One case of `python -m benchmarks router` in its own process, whose memory is the index's.

    python -m benchmarks.micro.index_case SEQUENCES.npz ROUNDS

Drivers of peers under `benchmarks/peers` take the same arguments and write the same JSON.
"""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np

from penstock.core.wire import HashArray
from penstock.router.radix import RadixTree

SEQUENCE_BLOCKS = 64
EVENT_BLOCKS = 16
_PREFIX_BLOCKS = SEQUENCE_BLOCKS // 2
_SEQUENCES_A_PREFIX = 8
_PASSES = 4  # over all sequences, in a round of lookups

Sequence = tuple[int, HashArray]
"""A worker and its blocks."""


def make_sequences(pairs: int, workers: int, seed: int) -> list[Sequence]:
    """Make sequences, eight with the same first half, until there are so many (worker, block) pairs."""
    rng = np.random.default_rng(seed)
    num_prefixes = max(pairs // SEQUENCE_BLOCKS // _SEQUENCES_A_PREFIX, 1)
    prefixes = rng.integers(0, 1 << 64, (num_prefixes, _PREFIX_BLOCKS), dtype=np.uint64)
    sequences: list[Sequence] = []
    held: set[tuple[int, int]] = set()
    while _PREFIX_BLOCKS * (len(sequences) + len(held)) < pairs:
        worker, prefix = int(rng.integers(workers)), int(rng.integers(num_prefixes))
        tail = rng.integers(0, 1 << 64, SEQUENCE_BLOCKS - _PREFIX_BLOCKS, dtype=np.uint64)
        sequences.append((worker, np.concatenate([prefixes[prefix], tail])))
        held.add((worker, prefix))
    return sequences


def write_sequences(path: Path, pairs: int, workers: int, seed: int) -> None:
    sequences = make_sequences(pairs, workers, seed)
    np.savez(
        path,
        workers=np.array([worker for worker, _ in sequences]),
        hashes=np.stack([hashes for _, hashes in sequences]),
    )


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main(path: str, rounds: int) -> dict[str, object]:
    """Store, look up and remove all sequences, `rounds` times."""
    with np.load(path) as file:
        workers, hashes = file["workers"].tolist(), list(file["hashes"])
    events = [
        (worker, sequence[start : start + EVENT_BLOCKS], int(sequence[start - 1]) if start else None)
        for worker, sequence in zip(workers, hashes, strict=True)
        for start in range(0, SEQUENCE_BLOCKS, EVENT_BLOCKS)
    ]
    blocks = SEQUENCE_BLOCKS * len(hashes)
    queries = [hashes[i] for i in np.random.default_rng(0).permutation(len(hashes)).tolist()]
    result: dict[str, list[float]] = {
        name: [] for name in ("lookups_per_s", "stored_blocks_per_s", "removed_blocks_per_s")
    }
    bytes_per_pair = 0.0
    for round_ in range(rounds):
        before_bytes = _resident_bytes()
        tree = RadixTree(None, max(workers) + 1)
        begin = time.perf_counter()
        for worker, run, parent in events:
            tree.store(worker, run, parent)
        result["stored_blocks_per_s"].append(blocks / (time.perf_counter() - begin))
        if round_ == 0:
            grown_bytes = max(_resident_bytes() - before_bytes, tree.stats().num_bytes)
            bytes_per_pair = grown_bytes / tree.stats().pairs
        begin = time.perf_counter()
        for _ in range(_PASSES):
            for query in queries:
                tree.match(query)
        result["lookups_per_s"].append(_PASSES * len(queries) / (time.perf_counter() - begin))
        begin = time.perf_counter()
        for worker, run, _ in reversed(events):
            tree.remove(worker, run)
        result["removed_blocks_per_s"].append(blocks / (time.perf_counter() - begin))
        assert tree.stats().pairs == 0, "everything is removed"
    return {**result, "bytes_per_pair": bytes_per_pair}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]))))
