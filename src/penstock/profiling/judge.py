"""Evaluates a fit: error at its cells, leave-one-out error, and error at held-out points."""

from msgspec.structs import replace

from penstock.perf.latency import LatencyModel
from penstock.perf.profile.evaluation import CellFit, Evaluation, HeldOut, Latency
from penstock.perf.profile.profile import DecodePoint, Point, PrefillPoint, Profile, ProfiledModel
from penstock.profiling.plan import CELLS_MIN
from penstock.profiling.sweep import Measured, outliers


def judge(profile: Profile, measured: Measured, left_out: tuple[str, ...]) -> Evaluation:
    """Evaluate `ProfiledModel(profile)`.

    Args:
        profile: profile of the measured points.
        measured: points of the sweep.
        left_out: cells not measured, with the reason.
    """
    model = ProfiledModel(profile)
    cells = [
        CellFit(
            cell=point.name,
            measured_s=point.seconds,
            fitted_s=model.point_s(point),
            left_out_s=_without(profile, point),
            samples=len(point.samples_s),
            outliers=outliers(point),
        )
        for point in profile.points
    ]
    held_out = [
        HeldOut(
            cell=point.name,
            latency=Latency.ITL if isinstance(point, DecodePoint) else Latency.TTFT,
            measured_s=point.seconds,
            predicted_s=predict_s(model, point, profile.step_tokens),
            samples=len(point.samples_s),
            outliers=outliers(point),
        )
        for point in measured.held_out
    ]
    return Evaluation.of(cells, held_out, (*left_out, *measured.left_out))


def predict_s(model: ProfiledModel, point: Point, step_tokens: int | None) -> float:
    """Predict a request's latency at a point: TTFT of a prompt, or ITL in a batch."""
    if isinstance(point, DecodePoint):
        return model.point_s(point)
    return ttft_s(model, point.new_tokens, point.cached_tokens, step_tokens)


def ttft_s(model: LatencyModel, new_tokens: int, cached_tokens: int, step_tokens: int | None) -> float:
    """Sum the step times of one prompt on an idle engine, each step with at most `step_tokens`."""
    if step_tokens is None:
        return model.prefill_s(new_tokens, cached_tokens)
    total_s, end = 0.0, cached_tokens + new_tokens
    for start in range(cached_tokens, end, step_tokens):
        total_s += model.prefill_s(min(step_tokens, end - start), start)
    return total_s


def _without(profile: Profile, point: Point) -> float | None:
    """Predict a point from a fit to the others; None if too few remain."""
    prefill = tuple(other for other in profile.prefill if other is not point)
    decode = tuple(other for other in profile.decode if other is not point)
    alone = sum(isinstance(other, PrefillPoint) and other.prompts == 1 for other in prefill)
    if min(alone, len(decode)) < CELLS_MIN:
        return None
    return ProfiledModel(replace(profile, prefill=prefill, decode=decode)).point_s(point)
