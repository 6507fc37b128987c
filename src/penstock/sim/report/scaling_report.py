"""The report's section of workers that were scaled, and its charts."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.core.types.instances import Role
from penstock.sim.deployment import Deployment
from penstock.sim.report.charts import COLOURS, Chart, Line, Points
from penstock.sim.scaling.record import RoleCount, ScalingRecord
from penstock.sim.simulate import Recording

_POINTS = 400


def report_scaling(recording: Recording, deployment: Deployment) -> dict[str, Any] | None:
    """Make the section; None where nothing scaled the workers."""
    record, end_s = recording.scaling, recording.end_s
    if record is None:
        return None
    return {
        "changes": {change: record.changes[change] for change in ("add", "retire", "flip")},
        "turns": record.turns,
        "rounds": dict(sorted(record.rounds.items())),
        "roles": {
            group.role.value: {
                "ready_mean": record.mean(group.role, end_s),
                "ready_min": min(_ready(record, group.role), default=0),
                "ready_max": max(_ready(record, group.role), default=0),
                "worker_hours": record.worker_s.get(group.role, 0.0) / 3600,
            }
            for group in deployment.role_groups
        },
        "workers": [
            {"at_s": at_s} | {role.value: count._asdict() for role, count in counts.items()}
            for at_s, counts in record.counts
        ],
        "decisions": [{"at_s": at_s, "what": found.explain()} for at_s, found in record.decisions],
    }


def _ready(record: ScalingRecord, role: Role) -> list[int]:
    return [counts.get(role, RoleCount()).ready for _, counts in record.counts]


def worker_counts(recording: Recording, deployment: Deployment) -> Chart:
    """Chart the workers of each role over time, of a deployment that was scaled."""
    record = recording.scaling
    assert record is not None, "scaled"
    xs = np.linspace(0, max(recording.end_s, 1e-9), _POINTS)
    lines = []
    for number, group in enumerate(deployment.role_groups):
        role = group.role
        held = _steps(record, xs, role, is_ready=False)
        lines += [
            Line(role.value, _steps(record, xs, role, is_ready=True), number),
            Line(f"{role}, with those that start or drain", held, number + COLOURS // 2),
        ]
    return Chart("Workers", "workers that serve, by role", xs, lines, unit="workers")


def total_counts(runs: Mapping[str, tuple[Recording, Deployment]]) -> Chart:
    """Chart the workers of all roles over time, one line per deployment."""
    xs = np.linspace(0, max([recording.end_s for recording, _ in runs.values()] + [1e-9]), _POINTS)
    lines = []
    for number, (name, (recording, deployment)) in enumerate(runs.items()):
        record, groups = recording.scaling, deployment.role_groups
        if record is None:
            ys = np.full(len(xs), float(sum(group.spec.replicas for group in groups)))
        else:
            ys = np.sum([_steps(record, xs, group.role, is_ready=False) for group in groups], axis=0)
        lines.append(Line(name, np.where(xs <= recording.end_s, ys, np.nan), number % COLOURS))
    return Chart("Workers", "workers that hold devices", xs, lines, unit="workers")


def _steps(record: ScalingRecord, xs: Points, role: Role, *, is_ready: bool) -> Points:
    """Give the workers of a role at each of `xs`."""
    at_s = np.asarray([at_s for at_s, _ in record.counts])
    counts = [entry.get(role, RoleCount()) for _, entry in record.counts]
    values = np.asarray([count.ready if is_ready else count.present for count in counts], dtype=np.float64)
    found: Points = values[np.maximum(np.searchsorted(at_s, xs, side="right") - 1, 0)]
    return found
