"""`python -m benchmarks router`: with and without a peer, in the processes it starts."""

import json

from benchmarks import command

QUICK = ("router", "--quick", "--pairs", "20000", "--workers", "3")
PEER = '{"lookups_per_s": [1, 2, 3], "stored_blocks_per_s": [5], "removed_blocks_per_s": [7], "bytes_per_pair": 9}'


def install_peer(folder, text):
    python = folder / "dynamo" / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\n{text}\n")
    python.chmod(0o755)


def test_without_a_peer_it_says_so_and_leaves_the_ratios_out(tmp_path, capsys):
    out = tmp_path / "router.json"
    assert command.main([*QUICK, "--peers", str(tmp_path), "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    names = {"lookups_per_s", "stored_blocks_per_s", "removed_blocks_per_s", "bytes_per_pair"}
    expected = {f"router_{name}_w3" for name in names}
    steps = {name for name in report["figures"] if name.startswith("longest_step_")}
    assert steps > {
        "longest_step_clear_ms",
        "longest_step_snapshot_applied_ms",
        "longest_step_kv_transfer_pairs_ms",
    }
    others = {"hot_prefix_us", "match_128k_ms", "match_many_two_threads"}
    assert report["figures"].keys() == expected | others | steps
    assert min(report["figures"].values()) > 0
    assert "no peer at" in capsys.readouterr().err


def test_beside_a_peer_there_are_ratios(tmp_path):
    install_peer(tmp_path, f"echo '{PEER}'")
    out = tmp_path / "router.json"
    assert command.main([*QUICK, "--peers", str(tmp_path), "--json", str(out)]) == 0
    figures = json.loads(out.read_text())["figures"]
    assert figures["peer_lookups_per_s_w3"] == 2
    assert figures["router_lookups_vs_peer_w3"] == figures["router_lookups_per_s_w3"] / 2
