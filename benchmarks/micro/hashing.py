"""Hashing speed, called as the frontend calls it."""

import argparse
import hashlib
import random
import statistics
import time
from collections.abc import Callable

import numpy as np

from penstock.bench.report import BenchReport
from penstock.core import hashing
from penstock.core.errors import ConfigError
from penstock.core.native import native

_VOCABULARY = 128_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=8192, help="tokens in a call (default 8192)")
    parser.add_argument("--block-size", type=int, default=16, help="tokens in a block (default 16)")
    parser.add_argument("--seed", type=int, default=0, help="of the token ids and the key (default 0)")


def run(options: argparse.Namespace) -> BenchReport:
    """Time the public function, its Python reference, and their bounds."""
    num_tokens, block_size = options.tokens, options.block_size
    if block_size < 1 or num_tokens < block_size:
        raise ConfigError(
            f"--tokens and --block-size: expected at least one block of one token, got {num_tokens} and {block_size}"
        )
    random_ = random.Random(options.seed)
    tokens = np.array([random_.randrange(_VOCABULARY) for _ in range(num_tokens)], dtype=np.int32)
    key = random_.randbytes(hashing.KEY_BYTES)
    first = hashing.root_hash(block_size, b"", key=key)
    copy, packed = np.empty_like(tokens), tokens.tobytes()

    samples, calls = (20, 5) if options.quick else (300, 20)
    seconds = {
        "block_hashes_s": _time(lambda: hashing.block_hashes(tokens, block_size, key=key), samples, calls),
        "reference_s": _time(
            lambda: hashing.block_hashes_python(tokens, block_size, first, {}, key), max(samples // 30, 1), 1
        ),
        "empty_call_s": _time(lambda: hashing.block_hashes(tokens[:0], block_size, key=key), samples, calls),
        "blake2b_s": _time(lambda: hashlib.blake2b(packed, key=key, digest_size=16).digest(), samples, calls),
        "sha256_s": _time(lambda: hashlib.sha256(packed).digest(), samples, calls),
        "copy_s": _time(lambda: np.copyto(copy, tokens), samples, calls),
    }
    median_s = {name: statistics.median(values) for name, values in seconds.items()}
    return BenchReport(
        name="hashing",
        config={
            "tokens": num_tokens,
            "block_size": block_size,
            "seed": options.seed,
            "quick": options.quick,
            "implementation": native.implementation if native else "python",
            "calls_per_sample": calls,
        },
        samples=seconds,
        limits={
            "blake2b_whole_buffer_tokens_per_s": num_tokens / median_s["blake2b_s"],
            "sha256_whole_buffer_tokens_per_s": num_tokens / median_s["sha256_s"],
            "copy_tokens_per_s": num_tokens / median_s["copy_s"],
        },
        figures={
            "hash_tokens_per_s": num_tokens / median_s["block_hashes_s"],
            "hash_tokens_per_s_best": num_tokens / min(seconds["block_hashes_s"]),
            "hash_reference_tokens_per_s": num_tokens / median_s["reference_s"],
            "hash_speedup_over_reference": median_s["reference_s"] / median_s["block_hashes_s"],
            "hash_call_overhead_us": median_s["empty_call_s"] * 1e6,
        },
    )


def _time(call: Callable[[], object], samples: int, calls: int) -> list[float]:
    """Give seconds per call, one value a sample."""
    call()
    seconds = []
    for _ in range(samples):
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        seconds.append((time.perf_counter() - begin) / calls)
    return seconds
