"""CPU time to plan KV transfers between workers of different layouts, and to list the ranges of many blocks."""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from penstock.bench.report import BenchReport
from penstock.core.errors import ConfigError
from penstock.transfer import KvLayout, reshard

_MODEL = KvLayout(
    num_layers=80, num_kv_heads=8, head_dim=128, dtype="bfloat16", element_bytes=2, block_size=16
)
"""Of Llama 3.1 70B."""
_LATENT = KvLayout(
    num_layers=61, num_kv_heads=1, head_dim=576, dtype="bfloat16", element_bytes=2, block_size=64, planes=1
)
"""Of DeepSeek-R1."""
_POOL_BLOCKS = 20_000
_TOKENS_FIRST, _HEADS_FIRST = "| block layer kv token head", "| block layer kv head token"
_PER_LAYER = "layer | kv block token head"
_CASES = {
    "heads_first_tp8_tp4": (_MODEL, (8, _HEADS_FIRST), (4, _HEADS_FIRST)),
    "tokens_first_tp8_tp4": (_MODEL, (8, _TOKENS_FIRST), (4, _TOKENS_FIRST)),
    "per_layer_tp8_tp4": (_MODEL, (8, _PER_LAYER), (4, _PER_LAYER)),
    "per_layer_to_heads_first_tp2_tp8": (_MODEL, (2, _PER_LAYER), (8, _HEADS_FIRST)),
    "latent_tp8_tp4": (_LATENT, (8, _PER_LAYER), (4, _PER_LAYER)),
}
"""Model, and tensor parallelism and order of either side."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--blocks", type=int, default=512, help="blocks to list (default 512)")


def run(options: argparse.Namespace) -> BenchReport:
    """Time planning for all ranks, and listing for one pair of ranks, in CPU time.

    Raises:
        ConfigError: there are not so many blocks.
    """
    if not 1 <= options.blocks <= _POOL_BLOCKS:
        raise ConfigError(f"--blocks: must be 1 to {_POOL_BLOCKS}, got {options.blocks}")
    samples = 3 if options.quick else 30
    ids = np.random.default_rng(1).permutation(_POOL_BLOCKS)[: options.blocks]
    seconds: dict[str, list[float]] = {}
    figures: dict[str, float] = {}
    for name, (model, *sides) in _CASES.items():
        source, target = (model.split(num_blocks=_POOL_BLOCKS, tp=tp, order=order) for tp, order in sides)
        move = reshard.plan(source, target).moves[0]
        regions = (range(move.source.num_regions), range(move.target.num_regions))
        seconds[f"plan_{name}_s"] = _time(partial(reshard.plan, source, target), samples)
        seconds[f"list_{name}_s"] = _time(partial(_list, move, ids, *regions), samples)
        figures[f"plan_{name}_ms"] = statistics.median(seconds[f"plan_{name}_s"]) * 1e3
        figures[f"list_{name}_ms"] = statistics.median(seconds[f"list_{name}_s"]) * 1e3
        figures[f"ranges_per_block_{name}"] = len(move.lengths)
        figures[f"bytes_per_range_{name}"] = move.block_bytes / len(move.lengths)
    config = {"blocks": options.blocks, "quick": options.quick}
    return BenchReport(name="reshard", config=config, samples=seconds, figures=figures)


def _list(
    move: reshard.RankMove, ids: NDArray[np.int64], source_regions: range, target_regions: range
) -> None:
    move.descriptors(ids, ids, source_regions=source_regions, target_regions=target_regions)


def _time(call: Callable[[], object], samples: int) -> list[float]:
    """Give seconds of CPU time, one value a call."""
    call()
    seconds = []
    for _ in range(samples):
        begin = time.process_time()
        call()
        seconds.append(time.process_time() - begin)
    return seconds
