"""A profile as tables, and as an HTML page of measured points, fit and errors that opens offline."""

import html
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from penstock.perf.profile import Evaluation, Latency, Profile, ProfiledModel, nearly_equal
from penstock.sim.charts import COLOURS, Chart, ChartLine, Dots, XAxis, chart_grid, make_document, text_table

HELD_OUT_COLUMNS = ("point kept back", "", "measured ms", "predicted ms", "error", "samples")
FIT_COLUMNS = ("cell", "measured ms", "fit", "left out", "samples")


def about(profile: Profile) -> list[tuple[str, str]]:
    """Give (name, value) rows about the engine, machine and time."""
    said = [
        ("engine", profile.engine),
        ("version", profile.engine_version),
        ("model", profile.model),
        ("hardware", profile.hardware),
        ("machine", profile.machine),
        ("measured at", profile.measured_at),
        ("seed", str(profile.seed)),
        ("points", f"{len(profile.prefill)} prefill, {len(profile.decode)} decode"),
    ]
    return [(name, value) for name, value in said if value]


def held_out_rows(evaluation: Evaluation) -> list[tuple[str, ...]]:
    return [
        (
            point.cell,
            point.latency.upper(),
            _ms(point.measured_s),
            _ms(point.predicted_s),
            f"{point.error:+.1%}",
            _samples(point.samples, point.outliers),
        )
        for point in evaluation.held_out
    ]


def fit_rows(evaluation: Evaluation) -> list[tuple[str, ...]]:
    return [
        (
            cell.cell,
            _ms(cell.measured_s),
            f"{cell.error:+.1%}",
            "" if cell.left_out_error is None else f"{cell.left_out_error:+.1%}",
            _samples(cell.samples, cell.outliers),
        )
        for cell in evaluation.cells
    ]


def verdict(evaluation: Evaluation) -> list[str]:
    """Give lines about the fit's errors, held-out points last."""
    fitted = [abs(cell.error) for cell in evaluation.cells]
    left_out = [abs(error) for cell in evaluation.cells if (error := cell.left_out_error) is not None]
    lines = [f"fit: median error {statistics.median(fitted):.1%}, largest {max(fitted):.1%}"]
    if left_out:
        lines.append(
            f"each cell left out in turn: median error {statistics.median(left_out):.1%}, largest {max(left_out):.1%}"
        )
    if min(cell.samples for cell in evaluation.cells) == 1:
        lines.append(
            "some cells have one sample, their first, which warms up; allow more --repeats or --max-seconds"
        )
    counted = {"TTFT": evaluation.ttft_median_error, "ITL": evaluation.itl_median_error}
    said = ", ".join(f"{name} {error:.1%}" for name, error in counted.items() if error is not None)
    if said:
        lines.append(f"{len(evaluation.held_out)} held-out points: median error of {said}")
    return lines


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def _samples(samples: int, outliers: int) -> str:
    return f"{samples}, {outliers} far off" if outliers else str(samples)


_LINE_POINTS = 60
_MS = 1e3


def make_page(profile: Profile) -> str:
    """Make the page of an evaluated profile."""
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
        ("Held-out points: measured and predicted", [HELD_OUT_COLUMNS, *held_out_rows(evaluation)]),
        ("Fitted cells", [FIT_COLUMNS, *fit_rows(evaluation)]),
    ]
    if evaluation.left_out_cells:
        tables.append(("Left out", [(text,) for text in evaluation.left_out_cells]))
    below = "".join(f"<h2>{html.escape(name)}</h2>{text_table(rows)}" for name, rows in tables)
    return make_document(f"Profile of {profile.model} on {profile.engine}", chart_grid(charts) + below)


def _prefill(profile: Profile, model: ProfiledModel) -> Chart:
    points = [point for point in profile.prefill if point.prompts == 1]
    curves = []
    for alike in nearly_equal(points, lambda point: point.cached_tokens):
        group = sorted(alike, key=lambda point: point.new_tokens)
        cached = round(np.mean([point.cached_tokens for point in group]))
        curves.append(
            _Curve(
                f"after {cached:,} cached" if cached else "nothing cached",
                [point.new_tokens for point in group],
                [point.seconds for point in group],
                partial(_prefill_s, model, cached),
            )
        )
    return _fitted("Prefill", "new tokens", curves)


def _prefill_s(model: ProfiledModel, cached: int, new_tokens: float) -> float:
    return model.prefill_s(round(new_tokens), cached)


def _decode_step_s(model: ProfiledModel, batch: int, context: float) -> float:
    return model.decode_step_s(batch, round(context * batch))


def _decode(profile: Profile, model: ProfiledModel) -> Chart:
    curves = []
    for batch in sorted({point.batch for point in profile.decode}):
        group = sorted((p for p in profile.decode if p.batch == batch), key=lambda p: p.context)
        contexts, seconds = [point.context for point in group], [point.seconds for point in group]
        curves.append(_Curve(f"batch {batch}", contexts, seconds, partial(_decode_step_s, model, batch)))
    return _fitted("Decode step", "tokens of context, each", curves)


@dataclass(frozen=True, slots=True)
class _Curve:
    """Measured points and the fitted function."""

    name: str
    xs: Sequence[int]
    seconds: Sequence[float]
    fitted_s: Callable[[float], float]

    def ms(self, x: float) -> float:
        """Give the fit in ms, clamped to the measured range."""
        return self.fitted_s(x) * _MS if self.xs[0] <= x <= self.xs[-1] else math.nan


def _fitted(title: str, x_name: str, curves: Sequence[_Curve]) -> Chart:
    measured = sorted({float(x) for curve in curves for x in curve.xs})
    xs = (
        np.union1d(measured, np.linspace(measured[0], measured[-1], _LINE_POINTS))
        if measured
        else np.zeros(0)
    )
    lines, dots = [], []
    for number, curve in enumerate(curves):
        colour = number % COLOURS
        lines.append(ChartLine(curve.name, np.array([curve.ms(x) for x in xs]), colour))
        dots.append(Dots(np.array(curve.xs, dtype=np.float64), np.array(curve.seconds) * _MS, colour))
    note = f"ms by {x_name}: measured (dots) and fitted"
    return Chart(title, note, xs, lines, unit="ms", dots=dots, x_axis=XAxis.PLAIN)


def _held_out(evaluation: Evaluation, latency: Latency, title: str) -> Chart:
    points = [point for point in evaluation.held_out if point.latency is latency]
    measured = np.array([point.measured_s for point in points]) * _MS
    predicted = np.array([point.predicted_s for point in points]) * _MS
    ends = np.array([0.0, max([*measured, *predicted], default=0.0)])
    return Chart(
        f"{title}, held-out points",
        "ms predicted (up) by ms measured (along); on the line both are equal",
        ends,
        [ChartLine("equal", ends, 1)],
        unit="ms",
        dots=[Dots(measured, predicted)],
        x_axis=XAxis.PLAIN,
    )


def _errors(evaluation: Evaluation) -> Chart:
    """Chart the cumulative distribution of errors per kind of point."""
    curves = {
        "fit": [abs(cell.error) for cell in evaluation.cells],
        "cell left out": [abs(e) for cell in evaluation.cells if (e := cell.left_out_error) is not None],
        "kept back": [abs(point.error) for point in evaluation.held_out],
    }
    found = {name: 100 * np.sort(errors) for name, errors in curves.items() if errors}
    xs = np.linspace(0.0, max((errors[-1] for errors in found.values()), default=1.0), _LINE_POINTS)
    lines = [
        ChartLine(name, np.searchsorted(errors, xs, side="right") / len(errors), number)
        for number, (name, errors) in enumerate(found.items())
    ]
    note = "share of points that are at most so many % off"
    return Chart("Errors", note, xs, lines, unit="%", y_max=1.0, x_axis=XAxis.PLAIN)
