"""`python -m benchmarks kv-retention`: its options, run and report."""

import argparse
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import replace

from benchmarks.eviction.conversations import Chats
from benchmarks.eviction.replay import Prompts
from benchmarks.kv.retention.replay import Case, replay
from benchmarks.kv.retention.workloads import CHATS, MIXTURE, NEIGHBOURS, SPAN_S, Ask, mixed
from benchmarks.runner import expect_at_least
from penstock.bench.report import BenchReport
from penstock.perf.hardware import find_hardware
from penstock.perf.model_config import find_shape
from penstock.perf.roofline import Roofline
from penstock.sim.engine_timing import prefill_price

_SAID = Case(names=True, tools=True)
CASES: Mapping[str, Case] = {
    "lru": Case("lru"),
    "seconds": Case(),
    "systems": Case(systems=True),
    "names": Case(names=True),
    "tools": Case(tools=True),
    "names-and-tools": _SAID,
    "priority-60s": replace(_SAID, priority_ttl_s=60),
}
"""What is said of the mixture's requests."""
SHARES: Mapping[str, Case] = {
    f"{eviction}-{share:g}": Case(eviction, tenant_share=share)
    for eviction in ("lru", "seconds")
    for share in (1.0, 0.5, 0.25, 0.1)
}
"""Shares of each tenant beside a neighbour; 1 is no bound."""
ALL = "all"
ALONE, ALONE_ON_HALF = "alone", "alone-on-half"
_MODEL, _HARDWARE = "llama-3.1-8b", "h100"
_BLOCKS = (1000, 3000, 10_000)
_QUICK_SPAN_S = 300.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--blocks",
        type=int,
        nargs="+",
        default=list(_BLOCKS),
        metavar="N",
        help="blocks of 512 tokens on the device (default 1000 3000 10000)",
    )
    parser.add_argument(
        "--seeds", type=int, default=2, metavar="N", help="workloads of each kind (default %(default)s)"
    )


def run(options: argparse.Namespace) -> BenchReport:
    """Replay the mixture in every case, and the chats of one tenant alone and beside each neighbour.

    Raises:
        ConfigError: an option is wrong.
    """
    expect_at_least(options, blocks=2, seeds=1)
    seeds, span_s = (1, _QUICK_SPAN_S) if options.quick else (options.seeds, SPAN_S)
    sizes = options.blocks[:1] if options.quick else options.blocks
    model = Roofline(find_shape(_MODEL), find_hardware(_HARDWARE))
    samples: dict[str, list[float]] = {}
    for seed in range(1, seeds + 1):
        for kind, parts, cases in _workloads():
            asks = mixed(parts, seed, span_s)
            prompts = Prompts([ask.row for ask in asks], model.prefill_s)
            for num_blocks in sizes:
                blocks = num_blocks // 2 if kind == ALONE_ON_HALF else num_blocks
                for name, case in cases.items():
                    hits = replay(asks, prompts.names, blocks, case, prefill_price(model))
                    for group, saved in _saved(asks, prompts, hits).items():
                        samples.setdefault(key_of(kind, name, group, num_blocks), []).append(saved)
    return BenchReport(
        name="kv-retention",
        config={
            "model": _MODEL,
            "hardware": _HARDWARE,
            "prices": "the roofline's prefill seconds of each prompt alone",
            "blocks": sizes,
            "seeds": seeds,
            "span_s": span_s,
            "quick": options.quick,
        },
        figures={name: round(statistics.fmean(values), 3) for name, values in samples.items()},
        samples={name: [round(value, 3) for value in values] for name, values in samples.items()},
    )


def key_of(kind: str, case: str, group: str, num_blocks: int) -> str:
    """Name the figure of a part of a workload: `kind` is `mixture` or a neighbour's name."""
    return f"{kind}_{case}_{group}_saved_percent_{num_blocks}_blocks"


def _workloads() -> Iterator[tuple[str, Mapping[str, Chats], Mapping[str, Case]]]:
    yield "mixture", MIXTURE, CASES
    chats = MIXTURE[CHATS]
    unbounded = {name: case for name, case in SHARES.items() if case.tenant_share == 1}
    for kind in (ALONE, ALONE_ON_HALF):
        yield kind, {CHATS: chats}, unbounded
    for name, neighbour in NEIGHBOURS.items():
        yield f"beside-{name}", {CHATS: chats, name: neighbour}, SHARES


def _saved(asks: list[Ask], prompts: Prompts, hits: list[int]) -> dict[str, float]:
    """Give the share of prefill seconds saved of each group and of all, in percent."""
    left, alone = dict[str, float](), dict[str, float]()
    for ask, left_s, alone_s in zip(asks, prompts.left_s(hits), prompts.alone_s, strict=True):
        for group in (ask.group, ALL):
            left[group] = left.get(group, 0.0) + left_s
            alone[group] = alone.get(group, 0.0) + alone_s
    return {group: 100 * (1 - left[group] / alone[group]) for group in alone}
