"""Accuracy of a profile: fit error, leave-one-out error, and error at held-out points."""

import statistics
from collections.abc import Sequence
from enum import StrEnum

from penstock.core.wire import Wire


class Latency(StrEnum):
    TTFT = "ttft"
    ITL = "itl"


class CellFit(Wire, frozen=True):
    """One measured cell. `left_out_s` is the prediction of a fit without it; None if too few cells would remain."""

    cell: str
    measured_s: float
    fitted_s: float
    left_out_s: float | None = None
    samples: int = 1
    outliers: int = 0

    @property
    def error(self) -> float:
        return self.fitted_s / self.measured_s - 1

    @property
    def left_out_error(self) -> float | None:
        return None if self.left_out_s is None else self.left_out_s / self.measured_s - 1


class HeldOut(Wire, frozen=True):
    """One point outside the fit, as TTFT or ITL of a request."""

    cell: str
    latency: Latency
    measured_s: float
    predicted_s: float
    samples: int = 1
    outliers: int = 0

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


class Evaluation(Wire, frozen=True):
    """Errors are predicted / measured - 1. Medians are of absolute errors; None without points."""

    cells: tuple[CellFit, ...]
    held_out: tuple[HeldOut, ...] = ()
    ttft_median_error: float | None = None
    itl_median_error: float | None = None
    left_out_cells: tuple[str, ...] = ()
    """Cells that were not measured, with the reason."""

    @classmethod
    def of(
        cls, cells: Sequence[CellFit], held_out: Sequence[HeldOut], left_out_cells: Sequence[str]
    ) -> "Evaluation":
        errors = {
            latency: [abs(point.error) for point in held_out if point.latency is latency]
            for latency in Latency
        }
        return cls(
            cells=tuple(cells),
            held_out=tuple(held_out),
            ttft_median_error=_median(errors[Latency.TTFT]),
            itl_median_error=_median(errors[Latency.ITL]),
            left_out_cells=tuple(left_out_cells),
        )


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None
