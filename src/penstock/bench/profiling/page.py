"""A profile as a page that opens offline: the points, the fit through them, and how far it is off."""

from collections.abc import Iterable, Sequence

import numpy as np

from penstock.bench.profiling.tables import about, fit_rows, held_out_rows
from penstock.perf.evaluation import Evaluation, HeldOut, Latency
from penstock.perf.profile import PrefillPoint, Profile, ProfiledModel
from penstock.sim.charts import Chart, Line, make_html

_LINE_POINTS = 60
_MS = 1e3


def make_page(profile: Profile) -> str:
    """Write the page of a profile that has its evaluation."""
    evaluation = profile.evaluation
    assert evaluation is not None, "judged"
    model = ProfiledModel(profile)
    charts = [
        _prefill(profile, model),
        _decode(profile, model),
        _held_out(evaluation, Latency.TTFT, "Time to first token"),
        _held_out(evaluation, Latency.ITL, "Time between tokens"),
        _errors(evaluation),
    ]
    tables: list[tuple[str, Sequence[Sequence[str]]]] = [
        ("Origin", about(profile)),
        ("Points kept back: measured and predicted", held_out_rows(evaluation)),
        ("Fitted cells", fit_rows(evaluation)),
    ]
    if evaluation.left_out_cells:
        tables.append(("Left out", [(text,) for text in evaluation.left_out_cells]))
    return make_html(f"Profile of {profile.model} on {profile.engine}", charts, tables)


def _prefill(profile: Profile, model: ProfiledModel) -> Chart:
    points = [point for point in profile.prefill if point.prompts == 1]
    lines: list[Line] = []
    for cached, group in _by_prefix(points).items():
        name = f"after {cached:,} cached" if cached else "nothing cached"
        lines.append(Line(name, [p.new_tokens for p in group], [p.seconds * _MS for p in group], dots=True))
        xs = np.linspace(group[0].new_tokens, group[-1].new_tokens, _LINE_POINTS)
        lines.append(Line(name, list(xs), [model.prefill_s(round(x), cached) * _MS for x in xs]))
    return Chart("Prefill, ms: measured (dots) and fitted", "new tokens", lines)


def _by_prefix(points: Iterable[PrefillPoint]) -> dict[int, list[PrefillPoint]]:
    """Group by cached tokens, in order of new ones."""
    groups: dict[int, list[PrefillPoint]] = {}
    for point in sorted(points, key=lambda p: (p.cached_tokens, p.new_tokens)):
        groups.setdefault(point.cached_tokens, []).append(point)
    return groups


def _decode(profile: Profile, model: ProfiledModel) -> Chart:
    lines: list[Line] = []
    for batch in sorted({point.batch for point in profile.decode}):
        group = sorted((p for p in profile.decode if p.batch == batch), key=lambda p: p.context)
        name = f"batch {batch}"
        lines.append(Line(name, [p.context for p in group], [p.seconds * _MS for p in group], dots=True))
        xs = np.linspace(group[0].context, group[-1].context, _LINE_POINTS)
        ys = [model.decode_step_s(batch, round(x * batch)) * _MS for x in xs]
        lines.append(Line(name, list(xs), ys))
    return Chart("Decode step, ms: measured (dots) and fitted", "tokens of context, each", lines)


def _held_out(evaluation: Evaluation, latency: Latency, title: str) -> Chart:
    points = [point for point in evaluation.held_out if point.latency is latency]
    most = max((max(p.measured_s, p.predicted_s) for p in points), default=0.0) * _MS
    return Chart(
        f"{title}, points kept back: predicted over measured, ms",
        "measured, ms",
        [
            Line("kept back", *_measured_predicted(points), dots=True),
            Line("equal", [0.0, most], [0.0, most]),
        ],
    )


def _measured_predicted(points: Sequence[HeldOut]) -> tuple[list[float], list[float]]:
    return [p.measured_s * _MS for p in points], [p.predicted_s * _MS for p in points]


def _errors(evaluation: Evaluation) -> Chart:
    """Show sorted absolute errors, so that each curve reads as: so many are at most so far off."""
    curves = {
        "fit": [abs(cell.error) for cell in evaluation.cells],
        "cell left out": [abs(e) for cell in evaluation.cells if (e := cell.left_out_error) is not None],
        "kept back": [abs(point.error) for point in evaluation.held_out],
    }
    lines = [
        Line(name, sorted(100 * error for error in errors), list(np.linspace(0, 1, len(errors))))
        for name, errors in curves.items()
        if errors
    ]
    return Chart("Share of points that are at most so far off", "error, %", lines, y_max=1.0)
