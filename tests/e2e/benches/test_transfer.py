"""`python -m benchmarks transfer`: with and without a peer, in the processes it starts."""

import json
import sys

import pytest

from benchmarks import command

pytestmark = pytest.mark.slow
QUICK = ("transfer", "--quick")
SHAPES = ("1x128MiB", "2048x32KiB", "512x256KiB", "128x1MiB")
PEER = """
import json, sys
print("{}", flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    print(json.dumps({"share": 0.25} if asked["op"] == "idle" else {"seconds": [0.5] * asked["reps"]}), flush=True)
"""


def install_peer(folder, text):
    python = folder / "nixl" / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    (folder / "peer.py").write_text(text)
    python.write_text(f"#!/bin/sh\nexec {sys.executable} {folder / 'peer.py'}\n")
    python.chmod(0o755)


def test_without_a_peer_it_says_so_and_leaves_the_ratios_out(tmp_path, capsys):
    out, plot = tmp_path / "transfer.json", tmp_path / "transfer.svg"
    arguments = ("--backends", "shm", "file", "--peers", str(tmp_path), "--storage", str(tmp_path))
    assert command.main([*QUICK, *arguments, "--json", str(out), "--plot", str(plot)]) == 0
    report = json.loads(out.read_text())
    figures = report["figures"]
    for shape in SHAPES:
        for op in ("read", "write"):
            assert figures[f"shm_{op}_{shape}_gb_per_s"] > 0
            assert figures[f"shm_{op}_{shape}_over_memcpy"] > 0
        assert report["limits"][f"memcpy_{shape}_gb_per_s"] > 0
        assert f"read {shape}, GB/s" in plot.read_text()
    assert {"shm_4KiB_us", "file_write_128x1MiB_gb_per_s", "idle_cpu_share_shm"} <= figures.keys()
    assert {"post_prepared_2048_us", "register_prepare_8192_ms", "metadata_one_slab_bytes"} <= figures.keys()
    assert not any(name.endswith("_over_nixl") for name in figures)
    assert "no peer at" in capsys.readouterr().err
    assert "no peer at" in report["config"]["skipped"]["nixl"]


def test_beside_a_peer_there_are_ratios_of_the_same_round(tmp_path):
    install_peer(tmp_path, PEER)
    out = tmp_path / "transfer.json"
    assert (
        command.main([*QUICK, "--backends", "memory", "shm", "--peers", str(tmp_path), "--json", str(out)])
        == 0
    )
    report = json.loads(out.read_text())
    figures, samples = report["figures"], report["samples"]
    (ours,) = samples["shm_write_1x128MiB_s"]
    assert figures["shm_write_1x128MiB_over_nixl"] == pytest.approx(0.5 / ours)
    assert figures["nixl_write_1x128MiB_gb_per_s"] == pytest.approx((128 << 20) / 0.5 / 1e9)
    assert figures["nixl_4KiB_us"] == 500_000
    assert figures["idle_cpu_share_nixl_progress_500us"] == 0.25
