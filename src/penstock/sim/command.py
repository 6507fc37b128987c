"""The command `penstock simulate`."""

import argparse
import json
import random
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from penstock import __version__
from penstock.core.document import parse_yaml
from penstock.core.errors import ConfigError
from penstock.graph import Graph, Overrides, load
from penstock.graph.overrides import SET
from penstock.sim.charts import say_s
from penstock.sim.deployment import RoleGroup, SimDeployment, hardware_hint, plan_deployment
from penstock.sim.outputs import check_outputs, put_out
from penstock.sim.page import SimulationRun, make_page
from penstock.sim.report import make_report, summarize
from penstock.sim.scaling import START_S
from penstock.sim.simulate import OnProgress, simulate
from penstock.sim.trace import read_trace
from penstock.sim.workload import SimSession, WorkloadConfig, make_sessions, rescaled, trace_sessions


@dataclass(frozen=True, slots=True)
class SimulationInputs:
    """Inputs beside the graph file.

    workload:  workload file
    changes:   graph fields set by flags, by dotted path
    workload_flags: flags that change the workload, as given
    profile:   profile of all engines; None for the roles' profiles or the roofline
    start_s:   seconds that a worker takes to start, where the graph has a planner
    """

    workload: Path
    seed: int
    changes: Mapping[str, Any] = field(default_factory=dict)
    workload_flags: Mapping[str, Any] = field(default_factory=dict)
    profile: Path | None = None
    start_s: float = START_S

    @property
    def heading(self) -> str:
        """Changes to the graph and the profile, as text; empty without any."""
        said = [f"{place}={value}" for place, value in self.changes.items()]
        if self.profile is not None:
            said.append(f"engines on the profile {self.profile.name}")
        return ", ".join(said)

    def report(self, deployment: SimDeployment, graph_file: str) -> dict[str, Any]:
        """Make the report's block `inputs`: file names without directories, devices of the decoding workers."""
        graph, role_group = deployment.graph, deployment.decoding[0]
        profile, file = role_group.profile, self.profile or role_group.spec.profile
        return {
            "version": __version__,
            "workload": self.workload.name,
            "workload_flags": dict(self.workload_flags),
            "seed": self.seed,
            "exact": deployment.exact,
            "graph": Path(graph_file).name,
            "set": dict(self.changes),
            "policy": graph.router.policy,
            "slo": None if graph.slo is None else graph.slo.model_dump(mode="json"),
            "hardware": role_group.hardware.name,
            "devices": deployment.devices,
            "usd_per_hour": role_group.hardware.usd_per_hour,
            "watts": role_group.hardware.watts,
            "tokens_per_step": role_group.spec.tokens_per_step,
            "worker_start_s": None if graph.planner is None else self.start_s,
            "engine_profile": profile
            and {
                "file": file and Path(file).name,
                "engine": profile.engine,
                "model": profile.model,
                "hardware": profile.hardware,
                "tensor_parallel": profile.tensor_parallel,
                "machine": profile.machine,
            },
        }


def mismatches(deployment: SimDeployment) -> list[str]:
    """List profiles whose model, hardware or parallelism differs from the deployment's."""
    return [
        text
        for role_group in deployment.role_groups
        if (text := _mismatch(role_group, deployment)) is not None
    ]


def _mismatch(role_group: RoleGroup, deployment: SimDeployment) -> str | None:
    profile, role, graph = role_group.profile, role_group.spec, deployment.graph
    if profile is None:
        return None
    names = {graph.model, Path(graph.model).name, graph.served_name, deployment.shape.name}
    sides = (
        ("model", profile.model, profile.model in names, graph.model),
        (
            "hardware",
            profile.hardware,
            profile.hardware == role_group.hardware.name,
            role_group.hardware.name,
        ),
        (
            "tensor_parallel",
            profile.tensor_parallel,
            profile.tensor_parallel == role.tensor_parallel,
            role.tensor_parallel,
        ),
    )
    differ = [f"{name} {theirs} for {ours}" for name, theirs, same, ours in sides if theirs and not same]
    return f"the profile is of another engine: {', '.join(differ)}" if differ else None


_SAMPLES = 300
_FILE_COLUMNS = 1000
_DRAWN_EVERY_S = 0.1
_START_S_MIN, _START_S_MAX = 0.1, 86_400.0
_SPEC_SUFFIXES = {".yaml", ".yml"}
_ONLY_WITH_TRACE = {"speed": None, "rate": None, "requests": None, "hit_ratio": 0.0, "skip_bad": False}
"""Flag: default value."""
_MOCK = re.compile(r"roles\.[a-z]+\.mock\b")

EXIT_NOTHING_COMPLETED = 1


def run_command(options: argparse.Namespace) -> int:
    """Run the command; see `_run`.

    Raises:
        ConfigError, PenstockError: as in `_run`.
        KeyboardInterrupt: after a line on stderr.
    """
    try:
        return _run(options)
    except KeyboardInterrupt:
        _warn("interrupted; no report was written")
        raise


def _run(options: argparse.Namespace) -> int:
    """Simulate, print the table, write the JSON and HTML files; returns the exit code.

    Raises:
        ConfigError: a file or flag is invalid, or the workload does not fit; raised before the simulation.
        PenstockError: a report could not be written.
    """
    if bool(options.graph) == bool(options.compare):
        raise ConfigError("--graph or --compare: give one of them, the deployments to simulate")
    if options.seed < 0:
        raise ConfigError(f"--seed: must be >= 0, got {options.seed}")
    start_s = _worker_start_s(options)
    paths = options.compare or [options.graph]
    overrides = _overrides(options)
    named = _named(paths)
    graphs = {name: load(path, overrides) for name, path in named.items()}
    if options.worker_start is not None and all(graph.planner is None for graph in graphs.values()):
        raise ConfigError(
            "--worker-start: no worker starts without a planner; give the graph one, as --set planner.max_workers=8"
        )
    deployments = {}
    for name, graph in graphs.items():
        with _blamed(named[name], graph, options):
            deployments[name] = plan_deployment(
                graph,
                beside=Path(named[name]).parent,
                engine_profile=options.engine_profile,
                exact=options.exact,
            )
    sessions = _load_sessions(options, block_size=max(graph.block_size for graph in graphs.values()))
    for name, deployment in deployments.items():
        with _blamed(named[name], deployment.graph, options):
            deployment.check(sessions)
    profiles = [options.engine_profile]
    profiles += [
        role_group.spec.profile
        for deployment in deployments.values()
        for role_group in deployment.role_groups
    ]
    check_outputs(
        {"--json": options.json, "--html": options.html},
        [options.workload, *paths, *filter(None, profiles)],
    )
    num_prompts = sum(len(session.turns) for session in sessions)
    for name, deployment in deployments.items():
        for text in mismatches(deployment):
            _warn(f"{name}: {text}")
        if num_too_long := deployment.count_too_long(sessions):
            _warn(
                f"{name}: {num_too_long:,} of {num_prompts:,} prompts do not fit the context of {deployment.shape.context_length:,} tokens and"
                " will fail; shorten the workload's prompts or take a model with a longer context"
            )
    inputs = SimulationInputs(
        Path(options.workload),
        options.seed,
        overrides.assigned(),
        {name: said for name, usual in _ONLY_WITH_TRACE.items() if (said := getattr(options, name)) != usual},
        options.engine_profile,
        start_s,
    )
    runs = [
        _simulate(name, deployment, sessions, options, start_s) for name, deployment in deployments.items()
    ]
    for run in runs:
        run.report["inputs"] = inputs.report(run.deployment, named[run.name])
    title = f"{inputs.workload.name} on {', '.join(deployments)}"
    title += f" ({inputs.heading})" if inputs.heading else ""
    content = {run.name: run.report for run in runs} if options.compare else runs[0].report
    put_out(
        partial(_print_table, title, runs),
        {
            "--json": (options.json, lambda: json.dumps(content, indent=1, allow_nan=False) + "\n"),
            "--html": (options.html, lambda: make_page(title, runs)),
        },
    )
    return 0 if all(run.report["completed"] for run in runs) else EXIT_NOTHING_COMPLETED


def _named(paths: list[str]) -> dict[str, str]:
    """Give each deployment the shortest unique name from its path."""
    for name in (lambda path: Path(path).stem, str):
        named = {name(path): path for path in paths}
        if len(named) == len(paths):
            return named
    twice = next(path for path in paths if paths.count(path) > 1)
    raise ConfigError(f"--compare: {twice} is given twice; give each deployment once")


def _worker_start_s(options: argparse.Namespace) -> float:
    seconds: float | None = options.worker_start
    if seconds is None:
        return START_S
    if not _START_S_MIN <= seconds <= _START_S_MAX:
        raise ConfigError(
            f"--worker-start: must be {_START_S_MIN:g} to {_START_S_MAX:,.0f} s, got {seconds:g}"
        )
    return seconds


def _simulate(
    name: str,
    deployment: SimDeployment,
    sessions: list[SimSession],
    options: argparse.Namespace,
    start_s: float,
) -> SimulationRun:
    is_sampled = options.html is not None or len(deployment.role_groups) > 1
    started_s = perf_counter()
    with _progress(name, sum(len(session.turns) for session in sessions)) as on_progress:
        recording = simulate(
            deployment,
            sessions,
            seed=options.seed,
            on_progress=on_progress,
            sample_interval_s=_sample_interval_s(sessions) if is_sampled else None,
            start_s=start_s,
        )
    report = make_report(recording, deployment, deployment.graph.slo, wall_s=perf_counter() - started_s)
    for code, text in recording.example.items():
        _warn(f"{name}: {recording.failures[code]:,} requests failed with {code}, the first with: {text}")
    return SimulationRun(name, deployment, recording, report)


def _print_table(title: str, runs: list[SimulationRun]) -> None:
    is_compared = len(runs) > 1
    expenses = {role_group.expenses for run in runs for role_group in run.deployment.role_groups}
    links = {link for run in runs if (link := run.deployment.link)}
    caption = [*(["* best; % against the first"] if is_compared else []), *sorted(expenses), *sorted(links)]
    table = Table(title=title, show_header=is_compared, caption="\n".join(caption))
    table.add_column("")
    table.add_column("", style="dim")
    for run in runs:
        table.add_column(run.name, justify="right")
    rows = summarize([run.report for run in runs])
    widths = [max(len(row.cells[column].difference) for row in rows) for column in range(len(runs))]
    for row in rows:
        cells = (
            f"{cell.value} {cell.difference:>{width}}{' *' if cell.is_best else '  '}"
            if is_compared
            else cell.value
            for cell, width in zip(row.cells, widths, strict=True)
        )
        table.add_row(
            row.name, row.unit, *(Text(cell, style="bold" if "*" in cell else "") for cell in cells)
        )
    console = Console()
    if not console.is_terminal:
        console.width = _FILE_COLUMNS  # no line breaks in a file
    console.print(table)


def _sample_interval_s(sessions: list[SimSession]) -> float:
    """Choose the sample interval: about `_SAMPLES` points per chart, and several for a burst."""
    return max(sessions[-1].at_s / _SAMPLES, 0.1)


def _warn(text: str) -> None:
    print(f"penstock simulate: {text}", file=sys.stderr)  # noqa: T201 - command output


def _overrides(options: argparse.Namespace) -> Overrides:
    overrides = Overrides(options.set)
    for place in overrides.assigned():
        if _MOCK.match(place):
            raise ConfigError(
                f"{SET} {place}: has no effect here: simulated engines take the time of the roofline or of a profile;"
                " leave it out"
            )
    for flag, place, value in (
        ("--policy", "router.policy", options.policy),
        ("--slo-ttft", "slo.ttft_s", options.slo_ttft),
        ("--slo-itl", "slo.itl_s", options.slo_itl),
    ):
        if value is not None:
            overrides.assign(place, value, flag=flag)
    return overrides


@contextmanager
def _blamed(path: str, graph: Graph, options: argparse.Namespace) -> Iterator[None]:
    """Add to an error the graph's name, if there are several, and a note if memory is short and its hardware was left out."""
    try:
        yield
    except ConfigError as error:
        whose = f"{path}: " if options.compare else ""
        raise ConfigError(whose + error.message + hardware_hint(graph, error.message)) from error


def _load_sessions(options: argparse.Namespace, *, block_size: int) -> list[SimSession]:
    """Read or generate the workload; prints the number of skipped lines."""
    path = Path(options.workload)
    if path.suffix in _SPEC_SUFFIXES:
        return _synthetic(path, options)
    if options.requests is not None and options.requests < 1:
        raise ConfigError(f"--requests: must be >= 1, got {options.requests}")
    bad: list[ConfigError] = []
    trace = read_trace(path, on_bad=bad.append if options.skip_bad else None)
    if bad:
        lines = "1 line was" if len(bad) == 1 else f"{len(bad):,} lines were"
        _warn(f"{lines} passed over (--skip-bad), the first: {bad[0].message}")
    trace = rescaled(trace[: options.requests], speed=options.speed, rate_per_s=options.rate)
    if options.hit_ratio and all(row.prefix_ids for row in trace):
        raise ConfigError(
            f"--hit-ratio: only with a trace without prefixes; {path} names those of its requests"
        )
    return list(trace_sessions(trace, seed=options.seed, hit_ratio=options.hit_ratio, block_size=block_size))


def _synthetic(path: Path, options: argparse.Namespace) -> list[SimSession]:
    for name, otherwise in _ONLY_WITH_TRACE.items():
        if getattr(options, name) != otherwise:
            raise ConfigError(
                f"--{name.replace('_', '-')}: only with a trace; {path} describes a workload itself"
            )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    config = WorkloadConfig.parse(parse_yaml(text, source=str(path)), source=str(path))
    return list(make_sessions(config, random.Random(options.seed)))


@contextmanager
def _progress(name: str, total: int) -> Iterator[OnProgress | None]:
    """Show a progress bar on a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("left"), TimeRemainingColumn(),
    )  # fmt: skip
    # Drawn here and not in a thread: the simulation keeps the GIL.
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as bar:
        task = bar.add_task(name, total=total)
        drawn_s = perf_counter()

        def on_progress(ended: int, virtual_s: float) -> None:
            nonlocal drawn_s
            now_s = perf_counter()
            is_due = now_s - drawn_s >= _DRAWN_EVERY_S
            if is_due:
                drawn_s = now_s
            described = f"{name}: simulated {say_s(virtual_s)}"
            bar.update(task, completed=ended, description=described, refresh=is_due)

        yield on_progress
