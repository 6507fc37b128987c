"""CPU time of one request in the block pool, from match to release, called as an engine calls it."""

import argparse
import statistics
import time
from collections import deque
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from benchmarks.runner import expect_at_least
from penstock.bench.report import BenchReport
from penstock.core.ids import BlockId
from penstock.core.native import native
from penstock.core.wire import HashArray
from penstock.kv.eviction import BlockUse
from penstock.kv.pool import BlockPool

_POOL_REQUESTS = 37
"""Requests that fill the pool: about those of an 8B model on one H100 with prompts of 12,000 tokens."""
_LIVE_REQUESTS = 16
_CHUNK_BLOCKS = 128
"""Blocks committed at once: 8,192 tokens of 64 a block."""
_PREFIXES = 40
_OUTPUT_BLOCKS = 4
_USE = BlockUse()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--blocks", type=int, nargs="+", default=[190, 760], help="blocks of a prompt (default 190 and 760)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the blocks' names (default 0)")


def run(options: argparse.Namespace) -> BenchReport:
    """Take the CPU time of a full pool, in which each allocation evicts blocks, and of the Python reference."""
    expect_at_least(options, blocks=2)
    rounds, requests = (2, 40) if options.quick else (20, 100)
    samples: dict[str, list[float]] = {}
    figures: dict[str, float] = {}
    for blocks in options.blocks:
        prompts = list(_prompts(np.random.default_rng(options.seed), blocks, rounds * requests))
        pools = {
            "pool": BlockPool(_POOL_REQUESTS * blocks, block_size=64),
            "pool_seconds": BlockPool(_POOL_REQUESTS * blocks, block_size=64, eviction="seconds"),
            "pool_reference": BlockPool(_POOL_REQUESTS * blocks, block_size=64, in_python=True),
        }
        for name, pool in pools.items():
            seconds = _serve(pool, prompts, requests)
            samples[f"{name}_request_s_{blocks}_blocks"] = seconds
            figures[f"{name}_request_us_{blocks}_blocks"] = statistics.median(seconds) * 1e6
        figures[f"pool_speedup_over_reference_{blocks}_blocks"] = (
            figures[f"pool_reference_request_us_{blocks}_blocks"]
            / figures[f"pool_request_us_{blocks}_blocks"]
        )
    return BenchReport(
        name="pool",
        config={
            "blocks": options.blocks,
            "pool_requests": _POOL_REQUESTS,
            "live_requests": _LIVE_REQUESTS,
            "seed": options.seed,
            "quick": options.quick,
            "implementation": "native" if native else "python",
            "requests_per_sample": requests,
        },
        samples=samples,
        figures=figures,
    )


def _prompts(rng: np.random.Generator, blocks: int, count: int) -> Iterator[HashArray]:
    """Give block hashes of prompts that share a quarter of their length with others on average."""
    prefixes = _names(rng, _PREFIXES * blocks).reshape(_PREFIXES, blocks, 2)
    for _ in range(count):
        hashes = _names(rng, blocks)
        shared = int(rng.integers(blocks // 2))
        hashes[:shared] = prefixes[rng.integers(_PREFIXES), :shared]
        yield hashes


def _names(rng: np.random.Generator, count: int) -> NDArray[np.uint64]:
    return rng.integers(0, 1 << 64, (count, 2), dtype=np.uint64, endpoint=False)


def _serve(pool: BlockPool, prompts: list[HashArray], requests: int) -> list[float]:
    """Give CPU seconds per request, one value for each `requests` of them; the first ones fill the pool."""
    live: deque[list[BlockId]] = deque()
    seconds = []
    for start in range(0, len(prompts), requests):
        begin = time.process_time()
        for hashes in prompts[start : start + requests]:
            live.append(_admit(pool, hashes))
            if len(live) > _LIVE_REQUESTS:
                pool.release(live.popleft(), _USE)
                pool.take_events()
        seconds.append((time.process_time() - begin) / requests)
    return seconds


def _admit(pool: BlockPool, hashes: HashArray) -> list[BlockId]:
    """Admit a prompt and publish its blocks in chunks, with each chunk's events."""
    held = pool.match(hashes)
    pool.count_idle(held)
    pool.acquire(held)
    start = len(held)
    taken = pool.allocate(len(hashes) - start + _OUTPUT_BLOCKS)
    assert taken is not None, "there is room for more than the live requests"
    held += taken
    while start < len(hashes):
        end = min(start + _CHUNK_BLOCKS, len(hashes))
        pool.commit(held[start:end], hashes[start:end], int(hashes[start - 1, 0]) if start else None)
        pool.take_events()
        start = end
    return held
