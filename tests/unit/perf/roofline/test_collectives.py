"""All-reduces by their size, beside those measured on hardware that nothing was fitted to."""

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from penstock.perf.model.hardware import find_hardware
from penstock.perf.model.parallel import Parallel
from penstock.perf.roofline.collectives import Collectives
from penstock.perf.roofline.factors import Factors

TABLES = json.loads((Path(__file__).parents[3] / "data" / "all_reduce_tables.json").read_text())


def collectives(system: str, tp: int, factors: Factors) -> Collectives:
    return Collectives(find_hardware(system), factors, Parallel(tp=tp), hidden=8192, row_bytes=16_384.0)


@pytest.mark.parametrize(
    "table",
    [table for table in TABLES if table["system"] != "h100_sxm"],
    ids=lambda t: f"{t['system']}-{t['backend']}-tp{t['tp']}",
)
def test_measured_all_reduces_of_other_hardware(table: dict[str, Any]) -> None:
    """vLLM's on two GB200 take twice as long as TensorRT-LLM's, which the form has no room for: the median alone tells."""
    model = collectives(table["system"], table["tp"], Factors())
    found = {int(size): 1e-6 * us for size, us in table["all_reduce_us"].items()}
    errors = [abs(model.all_reduce_s(size / 16_384) / seconds - 1) for size, seconds in found.items()]
    assert statistics.median(errors) < 0.5, errors
    if (table["system"], table["backend"]) != ("gb200", "vllm"):
        assert statistics.median(errors) < 0.35, errors
        assert max(errors) < 0.6, errors


def test_a_small_one_takes_its_latency_and_a_large_one_its_bytes() -> None:
    model, factors = collectives("h100", 8, Factors()), Factors()
    assert model.all_reduce_s(0) == factors.all_reduce_s
    gigabyte_s = model.all_reduce_s(1e9 / 16_384)
    assert gigabyte_s == pytest.approx(1e9 * 2 * 7 / 8 / (450e9 * factors.all_reduce_bandwidth), rel=0.02)


def test_between_them_it_grows_faster_than_its_bytes() -> None:
    model = collectives("h100", 8, Factors())
    row_s = model.all_reduce_s(2) - model.all_reduce_s(1)
    late_row_s = model.all_reduce_s(10_001) - model.all_reduce_s(10_000)
    assert row_s > 4 * late_row_s
