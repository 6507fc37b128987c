"""Moving bytes by every transport between two processes of this host, beside NIXL, memcpy and fio, in turns."""

import argparse
import os
import sys
import tempfile
from collections.abc import Awaitable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import uvloop

from benchmarks.transfer import plot
from benchmarks.transfer.contenders import (
    Contender,
    Memcpy,
    Ours,
    between_processes,
    to_storage,
    within_a_process,
)
from benchmarks.transfer.nixl_peer import VARIANTS, NixlPeer
from benchmarks.transfer.rounds import figures_of, limits_of, overheads, run_rounds
from benchmarks.transfer.shapes import POOL_BYTES, SHAPES, SMALL, Fio
from penstock.bench.report import BenchReport
from penstock.core.errors import ConfigError, PenstockError

_SMALL_REPEATS = 200
_BETWEEN_PROCESSES = {
    "shm": ("shm", "unix", "shared"),
    "shm_private": ("shm", "unix", "private"),
    "tcp": ("tcp", "tcp://127.0.0.1:0", "private"),
    "uds": ("tcp", "unix", "private"),
    "ours_nixl": ("nixl", "unix", "private"),
}
"""Transport, listening address and memory by backend."""
BACKENDS = (*_BETWEEN_PROCESSES, "memory", "file", "object")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = os.environ.get("PENSTOCK_PEERS", "~/.cache/penstock/peers")
    parser.add_argument(
        "--backends", nargs="+", choices=BACKENDS, default=list(BACKENDS), metavar="NAME",
        help=f"some of {', '.join(BACKENDS)} (default all)",
    )  # fmt: skip
    parser.add_argument(
        "--storage", type=Path, metavar="DIR", help="for files and objects (default the temporary one)"
    )
    parser.add_argument("--plot", type=Path, metavar="OUT", help="draw the figures into this SVG")
    parser.add_argument(
        "--peers", type=Path, default=Path(default), metavar="DIR",
        help="where peers are installed (default $PENSTOCK_PEERS, else ~/.cache/penstock/peers)",
    )  # fmt: skip


def run(options: argparse.Namespace) -> BenchReport:
    """Move every shape by every backend in turns, several times over."""
    python = options.peers.expanduser() / "nixl" / "venv" / "bin" / "python"
    report: BenchReport = uvloop.run(_run(options, python))
    if options.plot is not None:
        try:
            options.plot.write_text(plot.draw(report))
        except OSError as error:
            raise ConfigError(f"--plot: {options.plot}: cannot be written: {error.strerror}") from error
    return report


async def _run(options: argparse.Namespace, python: Path) -> BenchReport:
    rounds, repeats = (1, 1) if options.quick else (5, 3)
    variants = list(VARIANTS)[-1:] if options.quick else list(VARIANTS)
    skipped: dict[str, str] = {}
    figures: dict[str, float] = {}
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(_directory(options.storage)))
        moving = [
            *await _ours(stack, options.backends, skipped),
            Memcpy(),
            *await _peers(stack, python, variants, skipped),
        ]
        samples = await run_rounds(moving, SHAPES, rounds, repeats)
        samples.update(
            await run_rounds(
                [one for one in moving if one.name != "memcpy"], (SMALL,), rounds, _SMALL_REPEATS
            )
        )
        stored = await _stored(stack, options.backends, directory, skipped)
        samples.update(await run_rounds(stored, SHAPES, rounds, repeats))
        for one in moving:
            share = await one.idle_share(0.3 if options.quick else 3)
            if share is not None:
                figures[f"idle_cpu_share_{one.name}"] = share
        figures |= await overheads(
            next((one for one in moving if isinstance(one, Ours) and one.name == "shm"), None)
        )
    names = [one.name for one in (*moving, *stored)]
    return BenchReport(
        name="transfer",
        config={
            "pool_bytes": POOL_BYTES,
            "rounds": rounds,
            "quick": options.quick,
            "backends": names,
            "skipped": skipped,
            "nixl_variants": variants,
        },
        figures=figures_of(samples, names) | figures,
        samples=samples,
        limits=limits_of(samples),
    )


async def _ours(stack: AsyncExitStack, backends: Sequence[str], skipped: dict[str, str]) -> list[Contender]:
    found: list[Contender] = []
    for name, how in _BETWEEN_PROCESSES.items():
        if name in backends:
            await _try(found, skipped, name, between_processes(stack, name, *how))
    if "memory" in backends:
        found.append(await within_a_process(stack))
    return found


async def _peers(
    stack: AsyncExitStack, python: Path, variants: Sequence[str], skipped: dict[str, str]
) -> list[Contender]:
    try:
        return [
            await NixlPeer.start(stack, python, kind, variant)
            for kind in ("nixl", "nixl_tcp")
            for variant in variants
        ]
    except FileNotFoundError:
        _skip(
            skipped,
            "nixl",
            f"no peer at {python}, so no ratios; benchmarks/README.md says how to install one",
        )
        return []


async def _stored(
    stack: AsyncExitStack, backends: Sequence[str], directory: Path, skipped: dict[str, str]
) -> list[Contender]:
    found: list[Contender] = []
    for name in ("file", "object"):
        if name in backends:
            await _try(found, skipped, name, to_storage(stack, name, directory))
    if "file" in backends:
        try:
            found.append(Fio(directory))
        except PenstockError as error:
            _skip(skipped, "fio", error.message)
    return found


async def _try(
    found: list[Contender], skipped: dict[str, str], name: str, making: Awaitable[Contender]
) -> None:
    try:
        found.append(await making)
    except PenstockError as error:
        _skip(skipped, name, error.message)


def _skip(skipped: dict[str, str], name: str, why: str) -> None:
    skipped[name] = why
    print(f"benchmarks transfer: {name}: {why}", file=sys.stderr)


def _directory(parent: Path | None) -> "tempfile.TemporaryDirectory[str]":
    try:
        return tempfile.TemporaryDirectory(dir=parent)
    except OSError as error:
        raise ConfigError(f"--storage: {parent}: {error.strerror}") from error
