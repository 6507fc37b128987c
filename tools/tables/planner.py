"""What ways to scale hold and cost."""

import re
from collections.abc import Iterator

from tables.read import figure, of, report, table

_REPORT = "planner"
_STRATEGIES = {
    "static_peak": "static, for the peak",
    "static_mean": "static, for the mean",
    "autoscaler": "autoscaler on open requests",
    "interpolation": "throughput interpolation, constant forecast",
    "oracle": "oracle",
    "planner": "Penstock's planner",
}
_CASE = re.compile(r"(\w+_start\d+)_planner_attainment")


def planner() -> Iterator[str]:
    """SLO attainment, GPU-hours and changes of direction by case and strategy."""

    def rows() -> Iterator[list[str]]:
        cases = [match[1] for name in report(_REPORT)["figures"] if (match := _CASE.fullmatch(name))]
        for case in cases:
            for key, name in _STRATEGIES.items():
                whole = figure(_REPORT, f"{case}_static_peak_gpu_hours")
                hours = figure(_REPORT, f"{case}_{key}_gpu_hours")
                yield [
                    case,
                    name,
                    f"{of(_REPORT, f'{case}_{key}_attainment', '.2f', 100.0)} %",
                    of(_REPORT, f"{case}_{key}_gpu_hours", ",.1f"),
                    f"{100 * hours / whole:.0f} %" if hours and whole else "",
                    of(_REPORT, f"{case}_{key}_changes_per_hour", ".1f"),
                    of(_REPORT, f"{case}_{key}_failed", ".0f"),
                ]

    return table(
        ["case", "strategy", "within both targets", "GPU-hours", "of static", "turns an hour", "failed"],
        rows(),
    )


TABLES = {"planner": planner}
