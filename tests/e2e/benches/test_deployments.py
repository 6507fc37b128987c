"""The benches that start a deployment of their own: a quick run works and says what it should."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]


def run(name: str, *flags: str, out: Path) -> dict:
    command = [sys.executable, "-m", "benchmarks", name, "--quick", "--json", str(out), *flags]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=170, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert report["name"] == name
    assert {"schema", "commit", "date", "machine", "config", "samples", "limits", "figures"} < report.keys()
    return report


@pytest.mark.nightly
def test_eval(tmp_path: Path) -> None:
    report = run("eval", "--engine", "mock", out=tmp_path / "eval.json")
    figures = report["figures"]
    assert figures["eval_questions"] == figures["eval_migrations"] == figures["eval_remote_prefills"] == 3
    assert figures["eval_tokens"] == sum(report["samples"]["tokens_migrated"]) > 100
    for name in ("disaggregated", "migrated", "offloaded"):
        assert figures[f"eval_equal_tokens_{name}_share"] == figures[f"eval_equal_answers_{name}_share"] == 1
        assert figures[f"eval_score_{name}"] == figures["eval_score_aggregated"]
