"""The bench of plans: a quick run times the command that it names."""

import json
from pathlib import Path

import pytest

from penstock import cli

pytestmark = pytest.mark.slow


def test_a_quick_run_times_a_plan(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    assert cli.main(["bench", "plan", "--quick", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    (name,) = report["config"]["commands"]
    assert name == "llama-3.1-70b_h100_x16"
    assert 0 < report["limits"][f"search_s_{name}"] < report["figures"][f"plan_s_{name}"]
    assert report["figures"][f"layouts_{name}"] > 6, "more than are simulated"


def test_a_plan_that_fails_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "penstock.bench.plan._Case.arguments", lambda _: ["no-such-model", "--hardware", "h100"]
    )
    assert cli.main(["bench", "plan", "--quick", "--json", str(tmp_path / "plan.json")]) != 0
    assert "the plan of llama-3.1-70b_h100_x16 ended with 2" in capsys.readouterr().err
