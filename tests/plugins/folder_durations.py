"""How long the tests of each folder took, as a table at the end: `pytest --folder-durations`."""

from collections import defaultdict
from dataclasses import dataclass

import pytest


@dataclass
class Spent:
    """Of one folder: what its tests, their fixtures included, took in all."""

    tests: int = 0
    seconds: float = 0.0
    slowest_s: float = 0.0
    slowest: str = ""


def folder_of(nodeid: str) -> str:
    """Name the folder directly below tests/."""
    return "/".join(nodeid.split("::", maxsplit=1)[0].split("/")[:-1][:2])


class FolderDurations:
    """Adds up the reports of one session; under xdist they come from all its processes."""

    def __init__(self) -> None:
        self._of_test: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._of_test[report.nodeid] += report.duration

    def table(self) -> list[str]:
        """Give its lines, the folder that took longest first."""
        folders: dict[str, Spent] = defaultdict(Spent)
        for nodeid, seconds in self._of_test.items():
            spent = folders[folder_of(nodeid)]
            spent.tests += 1
            spent.seconds += seconds
            if seconds > spent.slowest_s:
                spent.slowest_s, spent.slowest = seconds, nodeid
        lines = [f"{'folder':<20} {'tests':>6} {'seconds':>8}  slowest test"]
        for name, spent in sorted(folders.items(), key=lambda pair: -pair[1].seconds):
            lines.append(
                f"{name:<20} {spent.tests:>6} {spent.seconds:>8.1f}  {spent.slowest_s:.1f} s {spent.slowest.removeprefix(name)[1:]}"
            )
        total = sum(spent.seconds for spent in folders.values())
        lines.append(f"{'all':<20} {len(self._of_test):>6} {total:>8.1f}")
        return lines

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("seconds by folder, of all processes together")
        for line in self.table():
            terminalreporter.write_line(line)
