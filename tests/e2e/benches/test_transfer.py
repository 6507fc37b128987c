"""`python -m benchmarks transfer`: with and without a peer, in the processes it starts."""

import json

import pytest

from benchmarks import command

pytestmark = [pytest.mark.slow, pytest.mark.nightly]
QUICK = ("transfer", "--quick")
SHAPES = ("1x128MiB", "2048x32KiB", "512x256KiB", "128x1MiB")


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
