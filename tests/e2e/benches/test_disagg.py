"""`python -m benchmarks disagg`: real processes of both kinds, a short run."""

import json

import pytest

from benchmarks import command

SHORT = ("--quick", "--prompt-tokens", "300", "400", "--seconds", "1")


@pytest.mark.slow
@pytest.mark.nightly
def test_a_quick_run_reports_both_sides_the_curve_and_the_kv_transfer(runtime_dir, tmp_path, capsys):
    out, plot = tmp_path / "disagg.json", tmp_path / "disagg.svg"
    assert command.main(["disagg", *SHORT, "--json", str(out), "--plot", str(plot)]) == 0
    report = json.loads(out.read_text())
    figures = report["figures"]
    sides = ("disaggregated", "aggregated", "aggregated_c8192", "aggregated_whole")
    for side in sides:
        for figure in ("itl_p99_ms", "ttft_p99_ms", "output_tokens_per_s"):
            assert figures[f"{figure}_{side}"] > 0
    assert figures["chunk_aggregated"] == 8192
    assert figures["itl_p99_ms_aggregated"] == figures["itl_p99_ms_aggregated_c8192"]
    assert report["limits"]["memcpy_gb_per_s"] > 1
    for side in ("disaggregated", "aggregated_c8192"):
        assert report["samples"][f"itl_s_{side}"]
        assert len(report["samples"][f"ttft_s_{side}"]) == figures["prompts_aggregated"]
    assert figures["prompts_disaggregated"] == figures["prompts_aggregated"] >= 1
    assert figures["kv_transfer_bytes"] > 1 << 20
    assert figures["kv_transfer_memcpy_ms"] > 0
    assert figures["role_change_s"] > 0
    assert plot.read_text().startswith("<svg")
    assert report["config"]["prompt_tokens"] == [300, 400]
    assert "1 prefill, 1 decode" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.nightly
def test_a_kv_transfer_alone(runtime_dir, tmp_path):
    out = tmp_path / "disagg.json"
    assert command.main(["disagg", "--kv-transfer", "2", "--turns", "1", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert {name: len(values) for name, values in report["samples"].items()} == {
        "kv_transfer_s summed 0": 2,
        "kv_transfer_s unsummed 0": 2,
    }
    assert "worker.kv_transfer.checksum=false" in report["config"]["unsummed"]
    assert report["figures"].keys() >= {"kv_transfer_ms", "kv_transfer_ratio_summed"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--prefill-share", "1"], "--prefill-share: must be > 0 and < 1, got 1"),
        (["--streams", "0"], "--streams: must be >= 1, got 0"),
        (["--kv-transfer", "0"], "--kv-transfer: must be >= 1, got 0"),
        (["--seconds", "nan"], "--seconds: must be >= 1, got nan"),
        (
            ["--prompt-tokens", "64", "200"],
            "--prompt-tokens: must be from 65 to 8000, the smaller one first, got 64 200",
        ),
        (["--prompt-tokens", "300", "200"], "the smaller one first, got 300 200"),
    ],
)
def test_options_that_make_no_sense_are_refused(capsys, options, words):
    assert command.main(["disagg", *options]) == 2
    assert words in capsys.readouterr().err
