"""The bench of placements: a quick run says what it should, and draws it."""

import json
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from benchmarks.command import main

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


def test_placements(tmp_path: Path) -> None:
    out, plot = tmp_path / "placements.json", tmp_path / "placements.svg"
    assert main(["placements", "--quick", "--json", str(out), "--plot", str(plot)]) == 0
    report = json.loads(out.read_text())
    assert report["name"] == "placements"
    figures, key = report["figures"], "x8_ttft1000ms_itl30ms"
    aggregated, disaggregated = (
        figures[f"aggregated_rps_per_gpu_{key}"],
        figures[f"disaggregated_rps_per_gpu_{key}"],
    )
    assert figures[f"ratio_{key}"] == pytest.approx(disaggregated / aggregated)
    assert 0.9 < disaggregated / aggregated < 1.7
    assert figures[f"ratio_slower_{key}"] > 1
    assert (
        figures["prompt_gpu_s_tp2_alone"] < figures["prompt_gpu_s_tp2_1024"] < figures["prompt_gpu_s_tp2_128"]
    )
    assert "predicted" in report["config"]["layouts"][f"disaggregated_{key}"][0]
    assert report["samples"]["itl_ms_x8"] == [30]
    assert ET.fromstring(plot.read_text()).tag.endswith("svg")
