"""Load or compute on a trace: mean prefill seconds without a store below the device, loading all that it has, and with the cut.

Requests come one after another through one pool, and a store keeps every block. The blocks that the device lacks and the
store has are loaded whole, or as far as `worth_loading` says, the function that engines ask. Prices are a roofline's.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.eviction.replay import Prompts
from benchmarks.eviction.workloads import WORKLOADS
from benchmarks.runner import expect_at_least
from penstock.bench.report import Report
from penstock.kv.manager.worth import worth_loading
from penstock.kv.pool.pool import BlockPool
from penstock.kv.pool.prefixes import block_keys
from penstock.kv.pool.use import BlockUse
from penstock.perf.model.catalogue import find_shape
from penstock.perf.model.hardware import find_hardware
from penstock.perf.roofline.roofline import Roofline
from penstock.sim.engine.prices import prefill_price
from penstock.sim.workload.trace import PREFIX_BLOCK_TOKENS, read_trace

SPEEDS_GB_PER_S = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0)
MODES = ("none", "always", "cut")
_MODEL, _HARDWARE = "llama-3.1-8b", "h100"
_NUM_BLOCKS = 3000
_QUICK_ROWS = 500
_SYNTHETIC = "agents"
_WORSE_MAX = 1.0
"""Mean prefill seconds with the cut over those without a store."""

LoadBlocks = Callable[[int, int, int], int]
"""How many of so many blocks to load: (blocks in the store, cached tokens before them, tokens of the prompt)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="in Mooncake's format (default: synthetic agents)"
    )
    parser.add_argument(
        "--blocks",
        type=int,
        default=_NUM_BLOCKS,
        metavar="N",
        help="blocks of 512 tokens on the device (default %(default)s)",
    )


def run(options: argparse.Namespace) -> Report:
    """Replay the requests in every mode, with a store of each speed.

    Raises:
        ConfigError: an option or the trace is wrong.
    """
    expect_at_least(options, blocks=2)
    shape = find_shape(_MODEL)
    model = Roofline(shape, find_hardware(_HARDWARE))
    rows = WORKLOADS[_SYNTHETIC](0) if options.trace is None else read_trace(options.trace)
    prompts = Prompts(rows[:_QUICK_ROWS] if options.quick else rows, model.prefill_s)
    block_bytes = PREFIX_BLOCK_TOKENS * shape.kv_bytes_per_token(shape.weight_dtype)
    figures: dict[str, float] = {}
    problems: list[str] = []
    none_s = _mean_s(prompts, options.blocks, model, 0.0, lambda *_: 0)
    figures["prefill_mean_ms_none"] = none_s * 1e3
    for speed in SPEEDS_GB_PER_S:
        block_s = block_bytes / (speed * 1e9)
        loads: dict[str, LoadBlocks] = {
            "always": lambda blocks, *_: blocks,
            "cut": _cut(prompts, block_s),
        }
        for mode, load_blocks in loads.items():
            mean_s = _mean_s(prompts, options.blocks, model, block_s, load_blocks)
            figures[f"prefill_mean_ms_{mode}_{speed:g}_gb_per_s"] = mean_s * 1e3
            figures[f"prefill_over_none_{mode}_{speed:g}_gb_per_s"] = mean_s / none_s
        if (ratio := figures[f"prefill_over_none_cut_{speed:g}_gb_per_s"]) > _WORSE_MAX:
            problems.append(
                f"with the cut and {speed:g} GB/s prefill takes {ratio:.3f} of that without a store, expected at most"
                f" {_WORSE_MAX:g}"
            )
    return Report(
        name="kv-cut",
        config={
            "model": _MODEL,
            "hardware": _HARDWARE,
            "blocks": options.blocks,
            "block_bytes": block_bytes,
            "trace": None if options.trace is None else options.trace.name,
            "requests": len(prompts.rows),
            "speeds_gb_per_s": SPEEDS_GB_PER_S,
            "quick": options.quick,
        },
        figures=figures,
        problems=problems,
    )


def _cut(prompts: Prompts, block_s: float) -> LoadBlocks:
    """Load as much as engines do: a store has one run of a prefix."""

    def load_blocks(blocks: int, cached_tokens: int, prompt_tokens: int) -> int:
        runs = worth_loading(
            [("store", blocks, blocks * PREFIX_BLOCK_TOKENS)],
            lambda _store, count: count * block_s,
            prompts.prefill_s,
            known_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
        )
        return blocks if runs else 0

    return load_blocks


def _mean_s(
    prompts: Prompts, num_blocks: int, model: Roofline, block_s: float, load_blocks: LoadBlocks
) -> float:
    """Give the mean seconds until a prompt is ready: those of loading its blocks, then those of computing the rest."""
    pool = BlockPool(num_blocks, PREFIX_BLOCK_TOKENS, "seconds", price=prefill_price(model))
    stored: set[bytes] = set()
    seconds = []
    for row, names in zip(prompts.rows, prompts.names, strict=True):
        # the last token of a prompt is always computed
        most = min(len(names), (row.input_tokens - 1) // PREFIX_BLOCK_TOKENS)
        held = pool.match(names)
        begin = min(len(held), most)
        found = _leading(block_keys(names[begin:most]), stored)
        loaded = load_blocks(found, begin * PREFIX_BLOCK_TOKENS, row.input_tokens) if found else 0
        cached = (begin + loaded) * PREFIX_BLOCK_TOKENS
        seconds.append(loaded * block_s + prompts.prefill_s(row.input_tokens - cached, cached))
        stored.update(block_keys(names))
        pool.acquire(held)
        taken = pool.allocate(len(names) - len(held))
        if taken is None:  # a prompt larger than the pool
            pool.release(held, BlockUse())
            continue
        pool.commit(taken, names[len(held) :], int(names[len(held) - 1, 0]) if held else None)
        pool.release(held + taken, BlockUse())
        pool.take_events()
    return statistics.fmean(seconds)


def _leading(keys: Sequence[bytes], stored: set[bytes]) -> int:
    return next((count for count, key in enumerate(keys) if key not in stored), len(keys))
