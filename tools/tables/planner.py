"""What ways to scale hold and cost."""

from collections.abc import Iterator

from tables.read import figure, link, of, report, table

CASES = {
    ("planner_azure", "trace_8b_start60"): "Azure's hour, 8B, start 60 s",
    ("planner_azure", "trace_8b_start300"): "Azure's hour, 8B, start 300 s",
    ("planner_azure_70b", "trace_70b_start60"): "Azure's hour, 70B TP4, start 60 s",
    ("planner_azure_70b", "trace_70b_start300"): "Azure's hour, 70B TP4, start 300 s",
    ("planner_mooncake", "trace_8b_start60"): "Mooncake's hour, 8B, start 60 s",
    ("planner_mooncake", "trace_8b_start300"): "Mooncake's hour, 8B, start 300 s",
    ("planner_day", "diurnal_70b_start60"): "day with bursts, 70B TP4, start 60 s",
    ("planner_day_300", "diurnal_70b_start300"): "day with bursts, 70B TP4, start 300 s",
    ("planner_steady", "steady_8b_start60"): "steady, 8B, start 60 s",
    ("planner", "growing_8b_start60"): "prompts grow, 8B, start 60 s",
    ("planner", "alternating_8b_start300"): "documents and chats, 8B, start 300 s",
}
"""What the docs call the cases, by report and name."""
PLANNERS = {
    "planner": "planner, aggregated",
    "planner-disaggregated": "planner, prefill and decode",
    "planner-without-flips": "the same without flips",
    "planner-switching": "planner, all three roles",
}
_OTHERS = {
    "static-peak": "static, for the peak",
    "static-mean": "static, for the mean",
    "autoscaler": "autoscaler",
    "interpolation": "interpolation",
    "oracle": "oracle",
}
_HELD = 0.99


def made() -> Iterator[tuple[str, str, str, dict[str, list[float]]]]:
    """Give report, case, title, and the settings of each strategy of the cases that were run."""
    for (name, case), title in CASES.items():
        settings = report(name)["config"].get("settings", {}).get(case)
        if settings:
            yield name, case, title, settings


def first_planner(settings: dict[str, list[float]]) -> str:
    """Give the planner that a case is about: with roles, that of prefill and decode."""
    return "planner-disaggregated" if "planner-disaggregated" in settings else "planner"


def planner_aims() -> Iterator[str]:
    """The planner's attainment, and its GPU-hours over those of the others."""

    def over(name: str, case: str, own: str, other: str) -> str:
        hours = figure(name, f"{case}_{own.replace('-', '_')}_gpu_hours")
        others = figure(name, f"{case}_{other}_gpu_hours")
        held = figure(name, f"{case}_{other}_attainment")
        if hours is None or not others or held is None:
            return "-"
        return f"{hours / others:.2f}" + ("" if held >= _HELD else f" (held {100 * held:.1f} %)")

    def rows() -> Iterator[list[str]]:
        for name, case, title, settings in made():
            own = first_planner(settings)
            place = f"{case}_{own.replace('-', '_')}"
            yield [
                link(title, name),
                f"{of(name, f'{place}_attainment', '.2f', 100.0)} %",
                *(
                    over(name, case, own, other)
                    for other in ("static_peak", "autoscaler", "interpolation", "oracle")
                ),
                of(name, f"{place}_changes_per_hour", ".1f"),
                of(name, f"{place}_failed", ".0f"),
            ]

    head = ["case", "within both targets", "GPU-hours over static at peak", "over the autoscaler"]
    return table([*head, "over interpolation", "over the oracle", "turns an hour", "failed"], rows())


TABLES = {"planner-aims": planner_aims}
