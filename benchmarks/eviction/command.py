"""`python -m benchmarks eviction`: its options, run and report."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_args

from benchmarks.eviction.host import Sizes, host_saved, read_sizes
from benchmarks.eviction.offline import replay_offline
from benchmarks.eviction.plot import draw
from benchmarks.eviction.replay import Prompts, replay
from benchmarks.eviction.workloads import WORKLOADS
from benchmarks.runner import expect_at_least
from penstock.bench.report import BenchReport
from penstock.core.errors import ConfigError
from penstock.kv.eviction import EvictionPolicy
from penstock.perf.hardware import find_hardware
from penstock.perf.model_config import find_shape
from penstock.perf.roofline import Roofline
from penstock.sim.engine_timing import prefill_price
from penstock.sim.trace import TraceRow, read_trace

POLICIES: tuple[EvictionPolicy, ...] = get_args(EvictionPolicy)
OFFLINE = "offline"
TRACE = "trace"
NO_HOST, UNBOUNDED = "no-host", "unbounded"
"""In place of a policy: without a host tier, and with one that never evicts."""
_HALVES = ("trace-first-half", "trace-second-half")
_MODEL, _HARDWARE = "llama-3.1-8b", "h100"
_BLOCKS = (1000, 3000, 10_000, 30_000)
_QUICK_ROWS = 1500
_QUICK_BLOCKS = (1000, 3000)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="in Mooncake's format; run as a whole and in halves (default: only the synthetic workloads)",
    )
    parser.add_argument(
        "--blocks",
        type=int,
        nargs="+",
        default=list(_BLOCKS),
        metavar="N",
        help="blocks of 512 tokens in the pool (default 1000 3000 10000 30000)",
    )
    parser.add_argument(
        "--host",
        nargs="+",
        metavar="DEVICE:HOST",
        help="compare policies of a host tier of HOST blocks below DEVICE blocks instead, such as 1000:3000",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the synthetic workloads (default 0)")
    parser.add_argument("--plot", type=Path, metavar="OUT", help="draw the shares saved as SVG")


def run(options: argparse.Namespace) -> BenchReport:
    """Replay every workload through a pool of each size with each policy, or through a device and a host tier.

    Raises:
        ConfigError: an option or the trace is wrong.
    """
    expect_at_least(options, blocks=2)
    if options.plot is not None and (options.plot.is_dir() or not options.plot.parent.is_dir()):
        raise ConfigError(f"--plot: {options.plot}: expected a file in a directory that exists")
    model = Roofline(find_shape(_MODEL), find_hardware(_HARDWARE))
    sizes = (
        [n for n in options.blocks if n in _QUICK_BLOCKS] or options.blocks[:1]
        if options.quick
        else options.blocks
    )
    workloads = {
        name: Prompts(rows[:_QUICK_ROWS] if options.quick else rows, model.prefill_s)
        for name, rows in _workloads(options).items()
    }
    if options.host is not None:
        return _host_report(options, workloads, model)
    figures: dict[str, float] = {}
    for name, prompts in workloads.items():
        for num_blocks in sizes:
            hits: dict[str, list[int]] = {
                policy: replay(prompts, num_blocks, policy, prefill_price(model)) for policy in POLICIES
            }
            hits[OFFLINE] = replay_offline(prompts.rows, num_blocks)
            for policy, found in hits.items():
                figures[key_of(name, policy, num_blocks)] = round(prompts.saved(found), 3)
    if options.plot is not None:
        options.plot.write_text(draw(figures), encoding="utf-8")
    return BenchReport(
        name="eviction",
        config={
            "model": _MODEL,
            "hardware": _HARDWARE,
            "prices": "the roofline's prefill seconds of each prompt alone",
            "trace": None if options.trace is None else options.trace.name,
            "blocks": sizes,
            "seed": options.seed,
            "quick": options.quick,
        },
        figures=figures,
    )


def _host_report(
    options: argparse.Namespace, workloads: Mapping[str, Prompts], model: Roofline
) -> BenchReport:
    try:
        pairs = read_sizes(options.host)
    except ValueError as error:
        raise ConfigError(f"--host: {error}") from error
    pairs = pairs[:1] if options.quick else pairs
    figures: dict[str, float] = {}
    for name, prompts in workloads.items():
        for device, host in pairs:
            alone = host_saved(prompts, Sizes(device, 0), "lru", model)
            figures[host_key(name, NO_HOST, device, host)] = round(alone, 3)
            for policy in POLICIES:
                saved = host_saved(prompts, Sizes(device, host), policy, model)
                figures[host_key(name, policy, device, host)] = round(saved, 3)
            everything = host_saved(prompts, Sizes(device, _num_distinct(prompts)), "lru", model)
            figures[host_key(name, UNBOUNDED, device, host)] = round(everything, 3)
    return BenchReport(
        name="eviction-host",
        config={
            "model": _MODEL,
            "hardware": _HARDWARE,
            "prices": "the roofline's prefill seconds of each prompt alone, and of loads from host memory",
            "trace": None if options.trace is None else options.trace.name,
            "host": [f"{device}:{host}" for device, host in pairs],
            "seed": options.seed,
            "quick": options.quick,
        },
        figures=figures,
    )


def _num_distinct(prompts: Prompts) -> int:
    return len({block for row in prompts.rows for block in row.prefix_ids})


def host_key(workload: str, policy: str, device: int, host: int) -> str:
    """Name the figure of a run with a host tier."""
    return f"{workload}_{policy}_saved_percent_{device}_{host}_blocks"


def key_of(workload: str, policy: str, num_blocks: int) -> str:
    """Name the figure of a run."""
    return f"{workload}_{policy}_saved_percent_{num_blocks}_blocks"


def _workloads(options: argparse.Namespace) -> Mapping[str, Sequence[TraceRow]]:
    found: dict[str, Sequence[TraceRow]] = {}
    if options.trace is not None:
        rows = read_trace(options.trace)
        if not any(row.prefix_ids for row in rows):
            raise ConfigError(
                f"--trace: {options.trace}: has no hash_ids, so no prefixes; give a Mooncake trace"
            )
        middle = len(rows) // 2
        found[TRACE] = rows
        found.update(zip(_HALVES, (rows[:middle], rows[middle:]), strict=True))
    for name, make in WORKLOADS.items():
        found[name] = make(options.seed)
    return found
