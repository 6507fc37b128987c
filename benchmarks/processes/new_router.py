"""A router that starts beside workers whose caches are full: when it can choose, and when its index has all their blocks."""

import argparse
from statistics import median

import uvloop

from penstock.bench.report import Report
from tests.support.filled_worker import Started, full_workers, start_router

_WORKERS = 4
_PAIRS, _QUICK_PAIRS = 1_000_000, 100_000
_STARTS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--pairs",
        type=int,
        metavar="N",
        help=f"of a worker and a block, in {_WORKERS} workers (default {_PAIRS})",
    )


def run(options: argparse.Namespace) -> Report:
    pairs = options.pairs or (_QUICK_PAIRS if options.quick else _PAIRS)
    starts = uvloop.run(_measure(pairs // _WORKERS))
    return Report(
        name="new-router",
        config={"workers": _WORKERS, "pairs": pairs, "starts": _STARTS},
        figures={
            "ready_s": median(start.ready_s for start in starts),
            "ready_s_max": max(start.ready_s for start in starts),
            "whole_s": median(start.whole_s for start in starts),
            "turn_cpu_s_max": max(start.turn_cpu_s_max for start in starts),
        },
        samples={
            "ready_s": [start.ready_s for start in starts],
            "whole_s": [start.whole_s for start in starts],
        },
    )


async def _measure(blocks: int) -> list[Started]:
    async with full_workers(_WORKERS, blocks) as instances:
        return [await start_router(instances, blocks) for _ in range(_STARTS)]
