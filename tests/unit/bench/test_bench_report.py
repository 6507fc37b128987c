import json

import pytest

from penstock.bench.report import Report
from penstock.core.errors import ConfigError

KEYS = ["name", "schema", "commit", "date", "machine", "config", "samples", "limits", "figures"]


def _report(**changes) -> Report:
    usual = {
        "name": "thing",
        "config": {"size": 3},
        "figures": {"thing_per_s": 12_345_678.9, "thing_ms": 1.25},
        "samples": {"thing_s": [0.5, 0.25]},
        "limits": {"best_per_s": 20.0},
    }
    return Report(**usual | changes)


def test_the_json_has_one_schema(tmp_path):
    path = tmp_path / "out.json"
    _report(problems=["not written"]).write(path)
    written = json.loads(path.read_text())
    assert list(written) == KEYS
    assert written["figures"] == {"thing_per_s": 12_345_678.9, "thing_ms": 1.25}
    assert written["samples"] == {"thing_s": [0.5, 0.25]}
    assert set(written["machine"]) == {"cpu", "cores", "memory_bytes", "system", "architecture", "python"}
    assert written["date"].endswith("+00:00")


def test_the_summary_shows_figures_and_limits():
    assert _report().summary().splitlines() == [
        "thing_per_s         12,345,679",
        "thing_ms            1.25",
        "best_per_s (limit)  20",
    ]


def test_a_file_that_cannot_be_written_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"--json: .*: cannot be written: Is a directory"):
        _report().write(tmp_path)
