"""`penstock plan` as people run it: its files are what the other commands take, and it ends as it should."""

import html
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from offline_browser import COUNT_INK, Charts, show

from penstock.cli import main

pytestmark = pytest.mark.slow

ASKED = [
    "llama-3.1-8b", "--hardware", "h100", "--gpus", "2", "--isl", "400", "--osl", "20", "--slo-ttft", "0.5",
]  # fmt: skip


def run(*arguments, cwd=None):
    command = [sys.executable, "-m", "penstock", *map(str, arguments)]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=170, cwd=cwd)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Plan once; give the files by the flags that named them."""
    folder = tmp_path_factory.mktemp("plan")
    files = {
        flag: folder / name
        for flag, name in (("--out", "g.yaml"), ("--plot", "p.html"), ("--json", "r.json"))
    }
    done = run("plan", *ASKED, "--slo-itl", "0.012", *(part for pair in files.items() for part in pair))
    assert done.returncode == 0, done.stderr
    assert "disaggregated serving gives" in done.stdout
    return files


@pytest.mark.needs("chromium")
def test_its_plot_is_drawn_by_a_browser_without_a_network(written: dict[str, Path], tmp_path: Path) -> None:
    text = written["--plot"].read_text()
    (chart,) = (json.loads(html.unescape(each)) for each in re.findall(r'data-chart="([^"]*)"', text))
    assert sum(y is not None for each in chart["series"] for y in each["ys"]) > 5
    page = tmp_path / "page.html"
    page.write_text(text.replace("</body>", COUNT_INK))
    shown = show(page)
    assert shown.console == shown.asked == []
    (ink,) = Charts(shown.dom).inks
    assert ink >= 500


def test_what_it_writes_is_what_simulate_and_graph_check_take(
    written: dict[str, Path], tmp_path: Path
) -> None:
    files = written
    report = json.loads(files["--json"].read_text())
    kinds = {layout["kind"] for layout in report["layouts"]}
    assert kinds == {"aggregated", "disaggregated"}
    rates = [layout["requests_per_s"] for layout in report["layouts"]]
    assert rates == sorted(rates, reverse=True)
    for layout in report["layouts"]:
        assert layout["simulated"]
        assert layout["gpus_used"] <= 2
        assert layout["ttft_s"] <= 0.5
        assert layout["itl_s"] <= 0.012
        assert 0 <= layout["kv_headroom"] <= 1
    assert len(report["curve"]) > 5
    workload = tmp_path / "w.yaml"
    rate = 0.9 * rates[0]
    workload.write_text(f"requests: 600\nrate_per_s: {rate}\ninput_tokens: 400\noutput_tokens: 20\n")
    simulated = tmp_path / "s.json"
    done = run("simulate", workload, "--graph", files["--out"], "--json", simulated)
    assert done.returncode == 0, done.stderr
    seen = json.loads(simulated.read_text())
    assert seen["failed"] == 0
    assert seen["ttft_s"]["p90"] < 0.5
    assert seen["itl_s"]["p90"] < 0.013
    _, serve, simulate = run("graph", "check", files["--out"]).stdout.splitlines()
    assert "penstock serve refuses it: model: 'llama-3.1-8b' is a shape" in serve
    assert simulate.endswith("penstock simulate takes it")


def test_a_model_in_a_directory_is_named_by_its_whole_path(tmp_path: Path) -> None:
    source = Path(__file__).parents[3] / "src" / "penstock" / "perf" / "data" / "llama-3.1-8b.json"
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(source.read_text())
    done = run("plan", "model", *ASKED[1:], "--slo-itl", "0.03", "--out", "sub.yaml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"model: {tmp_path / 'model'}\n" in (tmp_path / "sub.yaml").read_text()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["--slo-itl", "0.0001"], "--slo-itl 0.0001: a token takes"),
        (["--slo-itl", "0.03", "--gpus", "0"], "--gpus: must be >= 1 and <= 1,024, got 0"),
        (["--slo-itl", "0.03", "--hardware", "h10"], "hardware: unknown 'h10'; did you mean 'h100'?"),
        (["--slo-itl", "0.03", "--json", "/nowhere/r.json"], "expected a file in a directory that exists"),
        (["--slo-itl", "0.03", "--gpus", "many"], "argument --gpus: invalid int value: 'many'"),
    ],
)
def test_a_mistake_is_one_line(changes: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *ASKED, *changes]) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""
