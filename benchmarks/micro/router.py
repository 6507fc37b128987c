"""The prefix index as a router uses it: events in, matches out; beside a peer's index if one is installed."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.micro import index_case
from benchmarks.micro.index_steps import longest_steps_s
from penstock.bench.report import BenchReport
from penstock.core.errors import ConfigError
from penstock.core.hashing import block_hashes
from penstock.core.native import native
from penstock.core.wire import HashArray
from penstock.router.radix import RadixTree

_DRIVER = Path(__file__).resolve().parents[1] / "peers" / "dynamo_radix.py"
_HOT_WORKERS = _HOT_BLOCKS = 512
_LONG_TOKENS, _LONG_BLOCK_SIZE, _LONG_WORKERS = 128 * 1024, 16, 8
_BATCH_QUERIES, _BATCH_WORKERS = 256, 64
_CASE_TIMEOUT_S = 900


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = os.environ.get("PENSTOCK_PEERS", "~/.cache/penstock/peers")
    parser.add_argument(
        "--pairs", type=int, default=1_000_000, help="(worker, block) pairs (default 1,000,000)"
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 64, 512], help="(default 8 64 512)")
    parser.add_argument("--seed", type=int, default=0, help="of the sequences (default 0)")
    parser.add_argument(
        "--peers",
        type=Path,
        default=Path(default),
        metavar="DIR",
        help="where peers are installed (default $PENSTOCK_PEERS, else ~/.cache/penstock/peers)",
    )


def run(options: argparse.Namespace) -> BenchReport:
    """Run each number of workers in its own process, and then the peer."""
    if options.pairs < index_case.SEQUENCE_BLOCKS or min(options.workers) < 1:
        raise ConfigError(
            f"--pairs, --workers: expected at least {index_case.SEQUENCE_BLOCKS} pairs and one worker,"
            f" got {options.pairs} and {min(options.workers)}"
        )
    pairs = options.pairs // 50 if options.quick else options.pairs
    rounds = 2 if options.quick else 5
    peer = _peer_python(options.peers)
    samples: dict[str, list[float]] = {}
    figures: dict[str, float] = {}
    for workers in options.workers:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "sequences.npz"
            index_case.write_sequences(path, pairs, workers, options.seed)
            ours = _run_case([sys.executable, "-m", "benchmarks.micro.index_case"], path, rounds)
            theirs = _run_case([str(peer), str(_DRIVER)], path, rounds) if peer else None
        _add_case(figures, samples, f"w{workers}", ours, theirs)
    repeats = 2 if options.quick else 5
    for name, scale, measured in (
        ("hot_prefix", 1e6, _hot_prefix_s(repeats)),
        ("match_128k", 1e3, _match_long_s(repeats, options.seed)),
    ):
        samples[f"{name}_s"] = measured
        figures[f"{name}_{'us' if scale == 1e6 else 'ms'}"] = statistics.median(measured) * scale
    for name, seconds in longest_steps_s(pairs, options.seed).items():
        samples[f"longest_step_{name}_s"] = [seconds]
        figures[f"longest_step_{name}_ms"] = seconds * 1e3
    samples["match_many_two_threads"] = _two_threads(repeats, pairs, options.seed)
    figures["match_many_two_threads"] = statistics.median(samples["match_many_two_threads"])
    return BenchReport(
        name="router",
        config={
            "pairs": pairs,
            "workers": options.workers,
            "sequence_blocks": index_case.SEQUENCE_BLOCKS,
            "event_blocks": index_case.EVENT_BLOCKS,
            "rounds": rounds,
            "seed": options.seed,
            "quick": options.quick,
            "implementation": "native" if native else "python",
            "peer": "ai-dynamo-runtime, dynamo._core.RadixTree" if peer else None,
        },
        samples=samples,
        figures=figures,
    )


def _peer_python(peers: Path) -> Path | None:
    python = peers.expanduser() / "dynamo" / "venv" / "bin" / "python"
    if python.exists() and _DRIVER.exists():
        return python
    text = (
        f"benchmarks router: no peer at {python}, so no ratios; benchmarks/README.md says how to install one"
    )
    print(text, file=sys.stderr)
    return None


def _run_case(command: list[str], path: Path, rounds: int) -> dict[str, Any]:
    try:
        done = subprocess.run(
            [*command, str(path), str(rounds)],
            capture_output=True,
            text=True,
            timeout=_CASE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"{' '.join(command)}: took more than {_CASE_TIMEOUT_S} s; lower --pairs"
        ) from error
    if done.returncode:
        raise ConfigError(f"{' '.join(command)}: ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _add_case(
    figures: dict[str, float],
    samples: dict[str, list[float]],
    case: str,
    ours: dict[str, Any],
    theirs: dict[str, Any] | None,
) -> None:
    names = ("lookups_per_s", "stored_blocks_per_s", "removed_blocks_per_s")
    for name in names:
        samples[f"router_{name}_{case}"] = ours[name]
        figures[f"router_{name}_{case}"] = statistics.median(ours[name])
    figures[f"router_bytes_per_pair_{case}"] = ours["bytes_per_pair"]
    if theirs is None:
        return
    for name in names:
        samples[f"peer_{name}_{case}"] = theirs[name]
        figures[f"peer_{name}_{case}"] = statistics.median(theirs[name])
    figures[f"peer_bytes_per_pair_{case}"] = theirs["bytes_per_pair"]
    lookups = f"lookups_per_s_{case}"
    figures[f"router_lookups_vs_peer_{case}"] = figures[f"router_{lookups}"] / figures[f"peer_{lookups}"]


def _hot_prefix_s(repeats: int) -> list[float]:
    """Time complete matches of one prefix that every worker holds."""
    tree = RadixTree(None, _HOT_WORKERS)
    hashes = np.random.default_rng(0).integers(0, 1 << 64, _HOT_BLOCKS, dtype=np.uint64)
    for worker in range(_HOT_WORKERS):
        tree.store(worker, hashes)
    assert tree.match(hashes).depths.tolist() == [_HOT_BLOCKS] * _HOT_WORKERS
    return _time(lambda: tree.match(hashes).depths, repeats, calls=2000)


def _match_long_s(repeats: int, seed: int) -> list[float]:
    """Time hashing and matching one long prompt that some workers hold."""
    tokens = np.random.default_rng(seed).integers(0, 128_000, _LONG_TOKENS, dtype=np.int32)
    tree = RadixTree(None, _LONG_WORKERS)
    for worker in range(_LONG_WORKERS):
        tree.store(worker, block_hashes(tokens, _LONG_BLOCK_SIZE)[: 1000 * (worker + 1), 0])
    return _time(lambda: tree.match_tokens(tokens, _LONG_BLOCK_SIZE).depths, repeats, calls=100)


def _two_threads(repeats: int, pairs: int, seed: int) -> list[float]:
    """Give two threads' match throughput over one thread's."""
    sequences = index_case.make_sequences(pairs, _BATCH_WORKERS, seed)
    tree = RadixTree(None, _BATCH_WORKERS)
    for worker, hashes in sequences:
        tree.store(worker, hashes)
    queries = [hashes for _, hashes in sequences]
    batches = [queries[i : i + _BATCH_QUERIES] for i in range(0, len(queries), _BATCH_QUERIES)]
    gains = []
    for _ in range(repeats):
        alone_s = _threads_s(tree, batches, 1)
        gains.append(2 * alone_s / _threads_s(tree, batches, 2))
    return gains


def _threads_s(tree: RadixTree, batches: list[list[HashArray]], num_threads: int) -> float:
    start = threading.Barrier(num_threads + 1)

    def work() -> None:
        start.wait()
        for _ in range(4):
            for batch in batches:
                tree.match_many(batch)

    threads = [threading.Thread(target=work) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    start.wait()
    begin = time.perf_counter()
    for thread in threads:
        thread.join()
    return time.perf_counter() - begin


def _time(call: Callable[[], object], repeats: int, calls: int) -> list[float]:
    """Give seconds per call, one value a repeat."""
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        seconds.append((time.perf_counter() - begin) / calls)
    return seconds
