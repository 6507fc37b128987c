"""What a router pays for blocks that several workers load: told by each of them, or once for their host and for the fleet.

A host's blocks lie in the host tier, and the first blocks of each prompt on the device of one of its workers, too.
"""

import argparse
import time

import numpy as np
from numpy.typing import NDArray

from penstock.bench.report import Report
from penstock.core.types.events import Tier
from penstock.router.index.radix import RadixTree

_WORKERS_PER_HOST = 8
_PROMPT_BLOCKS, _DEVICE_BLOCKS = 64, 16
_HASH_BYTES = 8

Prompts = NDArray[np.uint64]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hosts", type=int, nargs="+", default=[1, 16, 64], help="(default 1 16 64)")
    parser.add_argument(
        "--blocks", type=int, default=256_000, help="in the host tiers of all hosts (default 256,000)"
    )


def run(options: argparse.Namespace) -> Report:
    """Fill an index and look prompts up, in turns: told by each worker, told once, and without lower tiers."""
    rounds = 2 if options.quick else 15
    blocks = options.blocks // 50 if options.quick else options.blocks
    samples: dict[str, list[float]] = {}
    figures: dict[str, float] = {}
    for hosts in options.hosts:
        prompts = np.random.default_rng(hosts).integers(
            0, 1 << 64, (max(blocks // _PROMPT_BLOCKS, hosts), _PROMPT_BLOCKS), dtype=np.uint64
        )
        for _ in range(rounds):
            for way in ("each", "once", "device"):
                measured, num_bytes = _round(prompts, hosts, way)
                for name, value in measured.items():
                    samples.setdefault(f"{name}_{way}_h{hosts}", []).append(value)
                figures[f"bytes_per_block_{way}_h{hosts}"] = num_bytes / prompts.size
        for way, told in (("each", _WORKERS_PER_HOST), ("once", 1)):
            figures[f"told_bytes_per_block_{way}_h{hosts}"] = float(told * _HASH_BYTES)
    figures |= {name: min(values) for name, values in samples.items()}  # other load only adds to them
    config = {"hosts": options.hosts, "workers_per_host": _WORKERS_PER_HOST, "blocks": blocks}
    sizes = {"prompt_blocks": _PROMPT_BLOCKS, "device_blocks": _DEVICE_BLOCKS, "rounds": rounds}
    return Report(name="shared-index", config=config | sizes, samples=samples, figures=figures)


def _round(prompts: Prompts, hosts: int, way: str) -> tuple[dict[str, float], int]:
    """Fill a new index; returns microseconds for a block and a lookup, and the index's bytes."""
    workers = hosts * _WORKERS_PER_HOST
    tree = RadixTree(None, workers + hosts)
    if way == "once":
        for worker in range(workers):
            tree.share(worker, [workers + worker // _WORKERS_PER_HOST])
    begin = time.perf_counter()
    for number, prompt in enumerate(prompts):
        host = number % hosts
        first = host * _WORKERS_PER_HOST
        tree.store(first + number // hosts % _WORKERS_PER_HOST, prompt[:_DEVICE_BLOCKS])
        if way == "each":
            for worker in range(first, first + _WORKERS_PER_HOST):
                tree.store(worker, prompt, tier=Tier.HOST)
        elif way == "once":
            tree.store(workers + host, prompt, tier=Tier.HOST)
    stored_s = time.perf_counter() - begin
    num_bytes = tree.stats().num_bytes
    queries = [prompts[i] for i in np.random.default_rng(0).permutation(len(prompts)).tolist()]
    begin = time.perf_counter()
    for query in queries:
        tree.match(query)
    match_s = time.perf_counter() - begin
    measured = {"store_us_per_block": stored_s / prompts.size * 1e6, "match_us": match_s / len(queries) * 1e6}
    return measured, num_bytes
