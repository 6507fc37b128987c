import json
from pathlib import Path

import pytest

from benchmarks.command import EXPERIMENTS, make_parser
from penstock.core.errors import ConfigError


def _main(*arguments: str) -> int:
    options = make_parser().parse_args(arguments)
    return options.run(options)


@pytest.mark.parametrize("name", EXPERIMENTS.modules)
def test_every_experiment_explains_its_arguments(name, capsys):
    with pytest.raises(SystemExit) as exit_info:
        _main(name, "--help")
    assert exit_info.value.code == 0
    assert "--quick" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "figure"),
    [
        (("hashing", "--tokens", "256"), "hash_tokens_per_s"),
        (("reshard", "--blocks", "4"), "plan_per_layer_tp8_tp4_ms"),
        (("pool", "--blocks", "4", "8"), "pool_speedup_over_reference_8_blocks"),
    ],
)
def test_a_quick_run_writes_its_report(arguments, figure, tmp_path, capsys):
    out = tmp_path / "report.json"
    assert _main(*arguments, "--quick", "--json", str(out)) == 0
    written = json.loads(out.read_text())
    assert written["name"] == arguments[0]
    assert written["figures"][figure] > 0
    assert figure in capsys.readouterr().out


def test_a_wrong_size_is_refused():
    with pytest.raises(ConfigError, match="at least one block"):
        _main("hashing", "--tokens", "8")
    with pytest.raises(ConfigError, match="--blocks: must be 1 to 20000, got 0"):
        _main("reshard", "--blocks", "0")


def test_a_report_that_cannot_be_kept_is_refused_before_the_run(tmp_path):
    with pytest.raises(ConfigError, match="expected a file in a directory that exists"):
        _main("hashing", "--json", str(tmp_path / "nowhere" / "out.json"))


@pytest.mark.slow
def test_a_quick_run_of_simulate_writes_figures_and_a_profile(tmp_path):
    out = tmp_path / "simulate.json"
    root = Path(__file__).parents[3]
    graph = root / "examples" / "graphs" / "8b-h100-x8.yaml"
    assert _main("simulate", "--quick", "--graph", str(graph), "--json", str(out)) == 0
    written = json.loads(out.read_text())
    for block_size in (16, 64, 512):
        assert written["figures"][f"simulate_requests_per_wall_s_b{block_size}"] > 0
    assert 0 < sum(share for [share] in written["samples"].values()) <= 1
