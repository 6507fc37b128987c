"""The table at the end of `make test`."""

import pytest
from folder_durations import FolderDurations


def report(nodeid: str, when: str, seconds: float) -> pytest.TestReport:
    return pytest.TestReport(nodeid, ("", None, ""), {}, "passed", None, when, duration=seconds)


def test_each_folder_has_a_line_the_longest_first() -> None:
    durations = FolderDurations()
    for nodeid, *seconds in (
        ("tests/unit/core/test_a.py::test_x[a/b::c]", 0.5, 1.0, 0.0),
        ("tests/unit/test_b.py::test_y", 0.0, 0.25, 0.0),
        ("tests/e2e/test_c.py::TestZ::test_z", 2.0, 3.0, 1.0),
    ):
        for when, spent_s in zip(("setup", "call", "teardown"), seconds, strict=True):
            durations.pytest_runtest_logreport(report(nodeid, when, spent_s))
    assert [line.split() for line in durations.table()] == [
        ["folder", "tests", "seconds", "slowest", "test"],
        ["tests/e2e", "1", "6.0", "6.0", "s", "test_c.py::TestZ::test_z"],
        ["tests/unit", "2", "1.8", "1.5", "s", "core/test_a.py::test_x[a/b::c]"],
        ["all", "3", "7.8"],
    ]
