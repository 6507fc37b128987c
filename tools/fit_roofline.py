"""Fits the roofline's factors to reference tables, and says what it comes to on those left out: `python tools/fit_roofline.py`.

Two fits, each by least p-norm of the log error: all-reduces to those measured on H100, then the rest to three of the six
latency tables. Prints the factors, which `penstock.perf.roofline` has rounded, and the errors of every table.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.perf.hardware import Dtype, find_hardware
from penstock.perf.model_config import find_shape
from penstock.perf.model_shape import Parallel
from penstock.perf.roofline import Collectives, Factors, Roofline

DATA = Path(__file__).parents[1] / "tests" / "data"
FITTED = {("h100_sxm", 1, "bf16"), ("h100_sxm", 4, "bf16"), ("h100_sxm", 2, "fp8")}
"""System, tensor parallelism and weights of the tables that are fitted; tests compare with the others."""
_ALL_REDUCE = ("all_reduce_bandwidth", "all_reduce_s", "all_reduce_ramp_s", "all_reduce_ramp_bytes")
_REST = ("gemm", "gemm_narrow", "gemm_half_rows", "attention", "kv_bandwidth", "layer_s", "step_s")
"""Not the bandwidth for weights and the passes of activations: three tables cannot tell them from launches."""
_FEW_TOKENS = 512
"""Shorter prompts are not fitted: their price is that of launches, which differ by engine."""
_ROUNDS = 1500


def is_fitted(table: dict[str, Any]) -> bool:
    return (table["system"], table["tp"], table["weights"]) in FITTED


def all_reduce_errors(table: dict[str, Any], factors: Factors) -> Iterator[float]:
    """Give the relative error of each size."""
    hardware, parallel = find_hardware(table["system"]), Parallel(tp=table["tp"])
    collectives = Collectives(hardware, factors, parallel, hidden=1, row_bytes=1.0)
    for size, found_us in table["all_reduce_us"].items():
        yield 1e6 * collectives.all_reduce_s(int(size)) / found_us - 1


def latency_errors(table: dict[str, Any], factors: Factors) -> dict[str, float]:
    """Give the relative error of each cell."""
    shape = find_shape("llama-3.1-8b" if "8B" in table["model"] else "llama-3.1-70b")
    engine = Roofline(
        shape,
        find_hardware(table["system"]),
        Parallel(tp=table["tp"]),
        Dtype(table["weights"]),
        factors=factors,
    )
    found = {f"prefill {n}": 1e3 * engine.prefill_s(int(n)) / ms - 1 for n, ms in table["prefill_ms"].items()}
    for cell, ms in table["decode_ms"].items():
        context, batch = map(int, cell.split("x"))
        found[f"decode {cell}"] = 1e3 * engine.decode_step_s(batch, batch * context) / ms - 1
    return found


def main() -> None:
    all_reduces = json.loads((DATA / "all_reduce_tables.json").read_text(encoding="utf-8"))
    tables = json.loads((DATA / "latency_tables.json").read_text(encoding="utf-8"))
    measured = [table for table in all_reduces if table["system"] == "h100_sxm"]
    fitted = [table for table in tables if is_fitted(table)]

    def of_all_reduces(factors: Factors) -> float:
        return _norm([error for table in measured for error in all_reduce_errors(table, factors)], 2)

    def of_steps(factors: Factors) -> float:
        errors = [
            error
            for table in fitted
            for cell, error in latency_errors(table, factors).items()
            if not cell.startswith("prefill") or int(cell.split()[1]) >= _FEW_TOKENS
        ]
        return _norm(errors, 4)

    factors = _fit(of_all_reduces, Factors(), _ALL_REDUCE)
    factors = _fit(of_steps, factors, _REST)
    for name in (*_ALL_REDUCE, *_REST):
        print(f"{name}: {getattr(factors, name):.4g}")
    for said, kept in (("fitted now", factors), ("as they stand in the package", Factors())):
        print(f"\n{said}")
        for table in all_reduces:
            worst = max(all_reduce_errors(table, kept), key=abs)
            print(f"all-reduce {table['system']} {table['backend']} tp{table['tp']}: worst {worst:+.0%}")
        for table in tables:
            cells = "  ".join(f"{cell} {error:+.0%}" for cell, error in latency_errors(table, kept).items())
            known = "fitted" if is_fitted(table) else "left out"
            print(f"{table['model']} {table['system']} tp{table['tp']} ({known}): {cells}")


def _norm(errors: Sequence[float], power: int) -> float:
    return float(np.mean(np.abs(np.log1p(errors)) ** power) ** (1 / power))


def _fit(cost: Callable[[Factors], float], start: Factors, names: Sequence[str]) -> Factors:
    """Search from `start` in the logarithms of some factors.

    Source: Nelder and Mead (1965).
    """

    def made(point: np.ndarray) -> Factors:
        return start.model_copy(
            update={name: math.exp(value) for name, value in zip(names, point, strict=True)}
        )

    def at(point: np.ndarray) -> float:
        factors = made(point)
        shares = (
            getattr(factors, name)
            for name in names
            if "bandwidth" in name or name.startswith(("gemm", "att"))
        )
        over = sum(max(0.0, share - 1) for share in shares if share < 2)
        return float(cost(factors) + over)

    origin = np.log([getattr(start, name) for name in names])
    points = [origin, *(origin + 0.2 * step for step in np.eye(len(names)))]
    costs = [at(point) for point in points]
    for _ in range(_ROUNDS):
        order = np.argsort(costs)
        points, costs = [points[i] for i in order], [costs[i] for i in order]
        centre, worst = np.mean(points[:-1], axis=0), points[-1]
        tried = [(at(centre + by * (centre - worst)), by) for by in (1.0, 2.0, -0.5)]
        best, by = min(tried)
        if best < costs[-1]:
            points[-1], costs[-1] = centre + by * (centre - worst), best
        else:
            points = [points[0] + 0.5 * (point - points[0]) for point in points]
            costs = [at(point) for point in points]
    return made(points[int(np.argmin(costs))])


if __name__ == "__main__":
    main()
