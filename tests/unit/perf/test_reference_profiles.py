"""The committed profiles are the reference tables, to the last digit."""

import json
import sys
from pathlib import Path

import pytest

from penstock.perf.profile import Profile

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "tools"))
import reference_profiles  # noqa: E402 - a script, not a package

TABLES = json.loads((ROOT / "tests" / "data" / "latency_tables.json").read_text())


@pytest.mark.parametrize("table", TABLES, ids=reference_profiles.name_of)
def test_a_table_is_its_profile(table: dict) -> None:
    profile = Profile.load(ROOT / "examples" / "profiles" / reference_profiles.name_of(table))
    assert profile == reference_profiles.profile_of(table)
    assert {point.new_tokens: point.seconds * 1e3 for point in profile.prefill} == pytest.approx(
        {int(tokens): ms for tokens, ms in table["prefill_ms"].items()}
    )
    assert {
        f"{point.context}x{point.batch}": point.seconds * 1e3 for point in profile.decode
    } == pytest.approx(table["decode_ms"])
    assert "aiconfigurator 0.12.0" in profile.machine
