"""Agents' TTFT by their rate: without sessions and host tier, and with each and both."""

from collections.abc import Mapping, Sequence

from benchmarks.lines import Look, Panel
from benchmarks.lines import draw as draw_panels

_LOOKS = {
    "neither": Look("#111827"),
    "sessions": Look("#059669"),
    "host tier": Look("#d97706"),
    "both": Look("#2563eb", 2.5),
}
_CASES = {"neither": "plain", "sessions": "sessions", "host tier": "host", "both": "both"}


def draw(figures: Mapping[str, float], rates_per_s: Sequence[float], target_p90_s: float) -> str:
    """Draw mean and p90 of TTFT in ms, p90 beside its target."""
    panels = []
    for metric, title in (
        ("ttft_mean_s", "agents' mean TTFT, ms"),
        ("ttft_p90_s", "agents' TTFT, 90th percentile, ms"),
    ):
        lines = {
            name: {rate: 1e3 * figures[f"{case} {rate:g}/s {metric}"] for rate in rates_per_s}
            for name, case in _CASES.items()
        }
        level = (1e3 * target_p90_s, "target") if metric == "ttft_p90_s" else None
        panels.append(Panel(f"{title}, by agents that start per second", lines, _LOOKS, level))
    return draw_panels(panels)
