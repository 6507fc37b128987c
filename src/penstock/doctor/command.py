"""The command `penstock doctor`."""

import asyncio
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from penstock.core.errors import ConfigError
from penstock.core.files import check_writable, write_whole
from penstock.doctor.examination import examine
from penstock.doctor.findings import OWN, PLACES, Findings, PathFinding


def paths_table(findings: Findings) -> Table:
    """Make the table of working paths, the fastest of each pair of memories first."""
    table = Table("with", "memory", "transport", box=None, header_style="bold", pad_edge=False)
    for title in ("read GB/s", "write GB/s", "4 KiB us"):
        table.add_column(title, justify="right")
    by_pair: dict[tuple[int, str, str], list[PathFinding]] = defaultdict(list)
    for path in findings.paths:
        if not path.refusal:
            by_pair[PLACES.index(path.place), path.local, path.remote].append(path)
    shown = -1
    for (place, local, remote), paths in sorted(by_pair.items(), key=lambda item: item[0][0]):
        for index, path in enumerate(sorted(paths, key=lambda path: -path.read_gb_per_s)):
            table.add_row(
                PLACES[place] if place != shown else "",
                f"{local} - {remote}" if index == 0 else "",
                path.transport,
                f"{path.read_gb_per_s:.2f}",
                f"{path.write_gb_per_s:.2f}",
                f"{path.latency_us:,.0f}",
            )
            shown = place
    return table


def engine_lines(findings: Findings) -> Iterator[str]:
    """Yield a line for each engine: what it runs on, its version, what is missing and the command that mends it."""
    width = max((len(engine.name) for engine in findings.engines), default=0) + 2
    for engine in findings.engines:
        runs = f"runs on {' and '.join(engine.devices)}" if engine.devices else "does not run here"
        said = [each for each in (runs, engine.version, engine.missing, engine.note) if each]
        yield f"{engine.name:<{width}}{', '.join(said)}" + (f"  ({engine.fix})" if engine.fix else "")


def absences(findings: Findings) -> Iterator[tuple[str, str]]:
    """Yield (path, reason) of what does not work."""
    working = {path.transport for path in findings.paths if not path.refusal}
    for memory in findings.memories:
        if memory.missing:
            yield memory.kind, memory.missing
    for transport in findings.transports:
        of_memory = {place: why for place, why in transport.refusals.items() if place not in PLACES}
        of_places = [transport.refusals[place] for place in reversed(PLACES) if place in transport.refusals]
        if of_memory:
            yield from ((transport.name, why) for why in dict.fromkeys(of_memory.values()))
        elif transport.name not in working:
            yield from (
                (transport.name, why) for why in of_places[:1]
            )  # within a process, another transport may work
    refused: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for path in findings.paths:
        if path.refusal and path.place != OWN:
            refused[path.transport, path.place, path.refusal].append(f"{path.local} - {path.remote}")
    for (name, place, why), pairs in refused.items():
        yield f"{name}, {place}, {', '.join(pairs)}", why


def run_command(out: Path | None, directory: Path | None) -> int:
    """Test all transports and print the findings; returns 1 if a transfer failed that should work.

    Args:
        out: JSON file; None for none.
        directory: directory of the file test; None for the temporary directory.

    Raises:
        ConfigError: `out` or `directory` is not writable.
    """
    if out is not None:
        check_writable(out, flag="--json")
    try:
        scratch = tempfile.TemporaryDirectory(prefix=".penstock-doctor-", dir=directory)
    except OSError as error:
        raise ConfigError(f"--directory: {directory}: {(error.strerror or str(error)).lower()}") from error
    with scratch as name:
        findings = asyncio.run(examine(Path(name)))
    _print(findings)
    if out is not None:
        write_whole(out, msgspec.json.format(msgspec.json.encode(findings), indent=1) + b"\n")
    for problem in findings.problems:
        print(f"penstock doctor: {problem}", file=sys.stderr)  # noqa: T201
    return 1 if findings.problems else 0


def _print(findings: Findings) -> None:
    console = Console(highlight=False)
    console.print(f"Penstock {findings.version}, {findings.machine}\n")
    console.print(paths_table(findings))
    console.print("\n[bold]not here[/bold]")
    for what, why in absences(findings):
        console.print(f"{what}: {why}", markup=False, soft_wrap=True)
    console.print("\n[bold]engines[/bold]")
    for line in engine_lines(findings):
        console.print(line, markup=False, soft_wrap=True)
    console.print("\n[bold]host[/bold]")
    for finding in findings.host:
        advice = f"  ({finding.advice})" if finding.advice else ""
        console.print(f"{finding.name:<28}{finding.value}{advice}", markup=False, soft_wrap=True)
