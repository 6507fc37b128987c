"""`penstock planner replay`: decides the rounds of a log again."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from penstock import __version__
from penstock.core.errors import ConfigError
from penstock.core.types.instances import Role
from penstock.deploy.commands.planner.text import clock
from penstock.graph import Graph, Overrides, Slo, build
from penstock.graph.capacities import make_capacity
from penstock.planner.config import PlannerConfig
from penstock.planner.estimate import slo as estimate
from penstock.planner.explain.entries import Entry, Run, read_entries
from penstock.planner.explain.replay import Replay, Replayed
from penstock.planner.policy import Policy

EXIT_DIFFERS = 1
_SHOWN = 20


def replay(path: Path, overrides: Overrides, *, as_json: bool) -> int:
    """Print the rounds that are decided differently now; returns the exit code.

    Args:
        path: the log.
        overrides: settings of the graph that are other than recorded.
        as_json: print each of these rounds as JSON.

    Raises:
        ConfigError: the file is no log, or the settings do not fit.
    """
    graphs: dict[float, Graph] = {}

    def graph_of(run: Run) -> Graph:
        if run.time_s not in graphs:
            if not run.graph:
                raise ConfigError(f"{path}: has no graph, so that nothing is known of the workers")
            graphs.clear()
            graphs[run.time_s] = build(run.graph, overrides, source=str(path))
        return graphs[run.time_s]

    again = Replay(
        lambda run: _policy(graph_of(run), Path(run.model_dir)),
        cool_down_s=lambda run: _settings(graph_of(run)).cool_down_s,
    )
    versions: set[str] = set()
    total, differing = 0, list[Replayed]()

    def entries() -> Iterator[Entry]:
        for entry in read_entries(path):
            if isinstance(entry, Run):
                versions.add(entry.version)
            yield entry

    for replayed in again.run(entries()):
        total += 1
        if replayed.differs:
            differing.append(replayed)
    if not total:
        raise ConfigError(f"{path}: no round that decided something")
    if as_json:
        lines = [_json(each) for each in differing]
    else:
        lines = [*_differences(differing), *_summary(total, len(differing), again, versions)]
    sys.stdout.write("".join(f"{text}\n" for text in lines))
    is_other = bool(overrides.assigned()) or versions != {__version__}
    return EXIT_DIFFERS if differing and not is_other else 0


def _settings(graph: Graph) -> PlannerConfig:
    return graph.planner or PlannerConfig()


def _policy(graph: Graph, model_dir: Path) -> Policy:
    config, slo = _settings(graph), graph.slo or Slo()
    capacities = [
        make_capacity(role, spec, model_dir=model_dir, block_size=graph.block_size, budget=config.budget)
        for role, spec in graph.roles.present().items()
    ]
    targets = estimate.Slo(ttft_s=slo.ttft_s, itl_s=slo.itl_s, percentile=slo.percentile)
    return Policy(config, targets, capacities)


def _json(each: Replayed) -> str:
    record = each.round.record
    fields = {
        "number": record.number,
        "time_s": each.round.time_s,
        "now": record.now,
        "recorded": record.target,
        "target": each.target,
        "why": each.why,
    }
    return msgspec.json.encode(fields).decode()


def _differences(differing: Sequence[Replayed]) -> Iterator[str]:
    for each in differing[:_SHOWN]:
        record = each.round.record
        roles = [role for role in each.target if each.target[role] != record.target.get(role)]
        if roles:
            counts = ", ".join(
                f"{role} {each.target[role]} instead of {record.target.get(role, 0)}" for role in roles
            )
        else:
            counts = "decided differently, the same after damping"
        yield f"{clock(each.round.time_s)}  {record.number:>5}  {counts}: {each.why}"
    if len(differing) > _SHOWN:
        yield f"and {len(differing) - _SHOWN} more rounds"


def _summary(total: int, differing: int, again: Replay, versions: set[str]) -> Iterator[str]:
    skipped = f", {again.skipped} without a decision" if again.skipped else ""
    by = ", ".join(sorted(versions))
    yield f"{total} rounds of penstock {by}: {total - differing} the same, {differing} not{skipped}"
    for role in sorted(again.recorded_s):
        yield f"{role}: {_hours(again.recorded_s, role)} worker-hours aimed at, {_hours(again.replayed_s, role)} now"


def _hours(seconds: dict[Role, float], role: Role) -> str:
    return f"{seconds.get(role, 0.0) / 3600:.3g}"
