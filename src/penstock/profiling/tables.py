"""A profile as text and table rows, for the terminal and the page."""

import statistics

from penstock.perf.profile.evaluation import Evaluation
from penstock.perf.profile.profile import Profile

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
