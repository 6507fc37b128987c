"""The bench of placements: a quick run says what it should, and draws it."""

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]


def test_placements(tmp_path: Path) -> None:
    out, plot = tmp_path / "placements.json", tmp_path / "placements.svg"
    command = [
        sys.executable,
        "-m",
        "benchmarks",
        "placements",
        "--quick",
        "--json",
        str(out),
        "--plot",
        str(plot),
    ]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=170, cwd=ROOT)
    assert done.returncode == 0, done.stderr
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
