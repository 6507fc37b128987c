"""The bench of plans: a quick run times the command that it names."""

import json
from pathlib import Path

import pytest

from benchmarks import command
from benchmarks.simulated.plan import _Plan

pytestmark = pytest.mark.slow


def test_a_quick_run_times_a_plan(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    assert command.main(["plan", "--quick", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    (name,) = report["config"]["commands"]
    assert name == "llama-3.1-8b_h100_x1"
    assert 0 < report["limits"][f"search_s_{name}"] < report["figures"][f"plan_s_{name}"]
    assert report["figures"][f"layouts_{name}"] > 6, "more than are simulated"


def test_a_plan_that_fails_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "benchmarks.simulated.plan._Case.arguments", lambda _: ["no-such-model", "--hardware", "h100"]
    )
    assert command.main(["plan", "--quick", "--json", str(tmp_path / "plan.json")]) != 0
    assert "the plan of llama-3.1-8b_h100_x1 ended with 2" in capsys.readouterr().err


@pytest.mark.parametrize(("flags", "code"), [(("--quick",), 0), ((), 1)])
def test_slowness_fails_a_whole_run_only(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
    code: int,
) -> None:
    slow = _Plan(31.0, {"aggregated": 1.0, "disaggregated": 0.0})
    monkeypatch.setattr("benchmarks.simulated.plan._plan", lambda _: slow)
    monkeypatch.setattr("benchmarks.simulated.plan._search", lambda _: (0.1, 7))
    assert command.main(["plan", *flags, "--json", str(tmp_path / "plan.json")]) == code
    said = "the first plan took 31.0 s, expected less than 30"
    assert (said in capsys.readouterr().err) is bool(code)
