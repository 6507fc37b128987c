"""KV blocks into the host tier and the slot file and back, beside LMCache's backends, memcpy and fio, in turns.

Blocks go in random order from and to a CPU engine's blocks. A store ends when the blocks can be found, a load when they are on
the device and verified; LMCache verifies nothing. Every round stores blocks that nobody has.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from benchmarks.kv_stores.lmcache_peer import LmcachePeer
from benchmarks.kv_stores.ours import Memcpy, OurDisk, OurHost, opening_s
from benchmarks.transfer.shapes import Fio, Shape
from penstock.bench.report import BenchReport
from penstock.core.descriptors import TransferOp
from penstock.core.errors import PenstockError

_SIZES = (256 << 10, 1 << 20)
_TOTAL_BYTES = 256 << 20
_QUICK_BYTES = 32 << 20
_ROUNDS = 7
_SLOTS, _QUICK_SLOTS = 1_000_000, 50_000
_OPEN_S_MAX = 5.0
_MEMCPY_WANTED = 0.7
_FIO_WANTED = 0.8
_DISK_STORE_OVER_LMCACHE_WANTED = 5.0

Contender = Callable[[int], Awaitable[dict[str, float]]]
"""Stores and loads blocks of names that follow from a seed; gives the seconds of both by `store` and `load`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = os.environ.get("PENSTOCK_PEERS", "~/.cache/penstock/peers")
    parser.add_argument(
        "--storage",
        type=Path,
        metavar="DIR",
        help="for files, on the disk to measure (default the temporary one)",
    )
    parser.add_argument(
        "--peers", type=Path, default=Path(default), metavar="DIR",
        help="where peers are installed: lmcache/bin/python (default $PENSTOCK_PEERS, else ~/.cache/penstock/peers)",
    )  # fmt: skip
    parser.add_argument(
        "--rounds", type=int, default=_ROUNDS, metavar="N", help=f"of each contender (default {_ROUNDS})"
    )


def run(options: argparse.Namespace) -> BenchReport:
    """Store and load by every contender in turns, for each size of block."""
    if options.quick:
        options.rounds = 2
    num_slots = _QUICK_SLOTS if options.quick else _SLOTS
    with tempfile.TemporaryDirectory(dir=options.storage) as directory:
        opened_s = opening_s(Path(directory), num_slots)
    report = asyncio.run(_run(options))
    problems = list(report.problems)
    if opened_s > _OPEN_S_MAX:
        problems.append(
            f"opening {num_slots:,} slots took {opened_s:.1f} s, expected at most {_OPEN_S_MAX:g}"
        )
    return replace(
        report,
        config={**report.config, "open_slots": num_slots},
        figures={**report.figures, "open_slots_s": opened_s},
        problems=problems,
    )


async def _run(options: argparse.Namespace) -> BenchReport:
    total_bytes = _QUICK_BYTES if options.quick else _TOTAL_BYTES
    samples: dict[str, list[float]] = defaultdict(list)
    skipped: dict[str, str] = {}
    for block_bytes in _SIZES:
        size = f"{block_bytes >> 10}_kib"
        async with AsyncExitStack() as stack:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.storage)))
            contenders = await _contenders(
                stack,
                options.peers.expanduser(),
                directory,
                Shape(size, total_bytes // block_bytes, block_bytes),
                skipped,
            )
            # the first round warms up
            for turn in range(options.rounds + 1):
                for name, measure in contenders.items():
                    for way, seconds in (await measure(2 * turn)).items():
                        if turn:
                            samples[f"{name}_{way}_s_{size}"].append(seconds)
    figures = {
        name.replace("_s_", "_gb_per_s_"): total_bytes / statistics.median(each) / 1e9
        for name, each in samples.items()
    }
    ratios, problems = judge(figures)
    return BenchReport(
        name="kv-stores",
        config={
            "total_bytes": total_bytes, "rounds": options.rounds, "quick": options.quick, "skipped": skipped,
            "block_bytes": list(_SIZES),
        },
        figures=figures | ratios,
        samples=dict(samples),
        problems=problems,
    )  # fmt: skip


async def _contenders(
    stack: AsyncExitStack,
    peers: Path,
    directory: Path,
    shape: Shape,
    skipped: dict[str, str],
) -> dict[str, Contender]:  # fmt: skip
    block_bytes, count = shape.size_bytes, shape.count
    host = await stack.enter_async_context(OurHost(block_bytes, count))
    disk = await stack.enter_async_context(OurDisk(directory / "slots", block_bytes, count))
    contenders: dict[str, Contender] = {
        "memcpy": Memcpy(block_bytes, count).measure, "host": host.measure, "disk": disk.measure
    }  # fmt: skip
    try:
        fio = Fio(directory)

        async def by_fio(_seed: int) -> dict[str, float]:
            return {
                "store": statistics.median(await fio.move(TransferOp.WRITE, shape, 1)),
                "load": statistics.median(await fio.move(TransferOp.READ, shape, 1)),
            }

        contenders["fio"] = by_fio
    except PenstockError as error:
        skipped["fio"] = str(error)
    try:
        peer = await LmcachePeer.start(
            stack, peers / "lmcache" / "bin" / "python", directory, block_bytes=block_bytes, count=count
        )
    except PenstockError as error:
        skipped["lmcache"] = str(error)
    else:
        contenders |= {
            "lmcache_host": peer.host, "lmcache_disk_direct": peer.disk_direct,
            "lmcache_disk_buffered": peer.disk_buffered,
        }  # fmt: skip
    return contenders


def judge(figures: dict[str, float]) -> tuple[dict[str, float], list[str]]:
    """Compute ratios to memcpy, fio and LMCache, and list those that are below what is wanted."""
    ratios: dict[str, float] = {}
    problems: list[str] = []

    def compare(way: str, size: str, *, ours: str, other: str, wanted: float) -> None:
        other_speed = figures.get(f"{other}_{way}_gb_per_s_{size}")
        if other_speed is None:
            return
        name = f"{ours}_{way}_over_{other}_{size}"
        ratios[name] = figures[f"{ours}_{way}_gb_per_s_{size}"] / other_speed
        if ratios[name] < wanted:
            problems.append(f"{name} is {ratios[name]:.2f}, expected at least {wanted}")

    sizes: Sequence[str] = [f"{block_bytes >> 10}_kib" for block_bytes in _SIZES]
    for size in sizes:
        for way in ("store", "load"):
            compare(way, size, ours="host", other="memcpy", wanted=_MEMCPY_WANTED)
            compare(way, size, ours="host", other="lmcache_host", wanted=1.0)
            compare(way, size, ours="disk", other="fio", wanted=_FIO_WANTED if size == sizes[0] else 0.0)
            for kind in ("direct", "buffered"):
                most = way == "store" and size == sizes[0]
                compare(
                    way, size, ours="disk", other=f"lmcache_disk_{kind}",
                    wanted=_DISK_STORE_OVER_LMCACHE_WANTED if most else 1.0,
                )  # fmt: skip
    return ratios, problems
