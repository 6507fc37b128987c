"""The bench of plans: a quick run times the command that it names."""

import json
from pathlib import Path

import pytest

from benchmarks import command

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


def test_a_quick_run_times_a_plan(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    assert command.main(["plan", "--quick", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    (name,) = report["config"]["commands"]
    assert name == "llama-3.1-8b_h100_x1"
    assert 0 < report["limits"][f"search_s_{name}"] < report["figures"][f"plan_s_{name}"]
    assert report["figures"][f"layouts_{name}"] > 6, "more than are simulated"
