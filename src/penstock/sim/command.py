"""What `penstock simulate` does."""

import argparse
import json
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from penstock.core.errors import ConfigError
from penstock.graph import Graph, Overrides, load
from penstock.graph.document import parse_yaml
from penstock.sim.deployment import Deployment, plan_deployment
from penstock.sim.page import make_page
from penstock.sim.report import make_report, rows
from penstock.sim.simulate import OnProgress, simulate
from penstock.sim.trace import read_trace
from penstock.sim.workload import Session, WorkloadConfig, make_sessions, rescaled, trace_sessions

_SAMPLES = 300
_SPEC_SUFFIXES = {".yaml", ".yml", ".json"}


def run_command(options: argparse.Namespace) -> int:
    """Simulate, print the table, write the JSON.

    Raises:
        ConfigError: a file or flag is wrong, or the workload cannot fit.
    """
    for flag, path in (("--json", options.json), ("--html", options.html)):
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise ConfigError(f"{flag}: {path}: expected a file in a directory that exists")
    if bool(options.graph) == bool(options.compare):
        raise ConfigError("--graph or --compare: give one of them, the deployments to simulate")
    if options.compare and options.html:
        raise ConfigError("--html: only with --graph; a page shows one deployment")
    graphs = [_load_graph(path, options) for path in options.compare or [options.graph]]
    deployments = [
        plan_deployment(
            graph, beside=Path(path).parent, engine_profile=options.engine_profile, exact=options.exact
        )
        for graph, path in zip(graphs, options.compare or [options.graph], strict=True)
    ]
    sessions, skipped = _load_sessions(options)
    longest_tokens = max(t.input_tokens + t.output_tokens for s in sessions for t in s.turns)
    for deployment in deployments:
        deployment.check_fits(longest_tokens)
    if skipped:
        _tell(f"{skipped} lines were passed over (--skip-bad)")
    names = [Path(path).stem for path in options.compare] or [graphs[0].name]
    if len(set(names)) < len(names):
        names = options.compare
    reports = {}
    for name, deployment in zip(names, deployments, strict=True):
        reports[name] = _play(name, deployment, sessions, options)
    _print_table(f"{Path(options.workload).name} on {', '.join(names)}", reports)
    if options.json is not None:
        content = reports if options.compare else reports[names[0]]
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


def _play(
    name: str, deployment: Deployment, sessions: list[Session], options: argparse.Namespace
) -> dict[str, Any]:
    started_s = perf_counter()
    with _progress(sum(len(session.turns) for session in sessions)) as on_progress:
        recording = simulate(
            deployment,
            sessions,
            seed=options.seed,
            on_progress=on_progress,
            sample_interval_s=_sample_interval_s(sessions) if options.html is not None else None,
        )
    slo = deployment.graph.slo
    report = make_report(recording, deployment, slo, wall_s=perf_counter() - started_s)
    for code, text in recording.example.items():
        _tell(f"{name}: {recording.failures[code]} requests failed with {code}, the first with: {text}")
    if options.html is not None:
        title = f"{Path(options.workload).name} on {name}"
        options.html.write_text(make_page(title, report, recording, slo), encoding="utf-8")
    return report


def _print_table(title: str, reports: dict[str, dict[str, Any]]) -> None:
    table = Table(title=title, show_header=len(reports) > 1)
    table.add_column("")
    columns = []
    for name, report in reports.items():
        table.add_column(name, justify="right")
        columns.append(rows(report))
    for row in zip(*columns, strict=True):
        table.add_row(row[0][0], *(value for _, value in row))
    Console().print(table)


def _sample_interval_s(sessions: list[Session]) -> float:
    """Sample so often that a chart has about `_SAMPLES` points, and one of a burst some."""
    return max(sessions[-1].at_s / _SAMPLES, 0.1)


def _tell(text: str) -> None:
    print(f"penstock simulate: {text}", file=sys.stderr)  # noqa: T201 - what a command is for


def _load_graph(path: str, options: argparse.Namespace) -> Graph:
    overrides = Overrides(options.set)
    for flag, place, value in (
        ("--policy", "router.policy", options.policy),
        ("--slo-ttft", "slo.ttft_s", options.slo_ttft),
        ("--slo-itl", "slo.itl_s", options.slo_itl),
    ):
        if value is not None:
            overrides.assign(place, value, flag=flag)
    return load(path, overrides)


def _load_sessions(options: argparse.Namespace) -> tuple[list[Session], int]:
    """Read or make the workload up; also says how many lines were passed over."""
    path = Path(options.workload)
    if path.suffix in _SPEC_SUFFIXES:
        return _made_up(path, options), 0
    bad: list[ConfigError] = []
    trace = rescaled(
        read_trace(path, on_bad=bad.append if options.skip_bad else None),
        speed=1.0 if options.speed is None else options.speed,
        rate_per_s=options.rate,
    )
    if options.requests is not None:
        if options.requests < 1:
            raise ConfigError(f"--requests: must be >= 1, got {options.requests}")
        trace = trace[: options.requests]
    return list(trace_sessions(trace, seed=options.seed, hit_ratio=options.hit_ratio)), len(bad)


def _made_up(path: Path, options: argparse.Namespace) -> list[Session]:
    for flag in ("speed", "rate", "requests"):
        if getattr(options, flag) is not None:
            raise ConfigError(f"--{flag}: only with a trace; set it in {path}")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    config = WorkloadConfig.parse(parse_yaml(text, source=str(path)), source=str(path))
    return list(make_sessions(config, random.Random(options.seed)))


@contextmanager
def _progress(total: int) -> Iterator[OnProgress | None]:
    """Show a bar on a terminal, and nothing elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("simulating", total=total)

        def on_progress(ended: int, virtual_s: float) -> None:
            bar.update(task, completed=ended, description=f"simulated {virtual_s:,.0f} s")

        yield on_progress
