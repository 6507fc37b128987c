"""The command `penstock doctor`."""

import asyncio
import sys
import tempfile
from pathlib import Path

import msgspec
from rich.console import Console

from penstock.core.errors import ConfigError
from penstock.core.files import check_writable, write_whole
from penstock.doctor.examination import examine
from penstock.doctor.findings import Findings
from penstock.doctor.tables import absences, engine_lines, paths_table


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
