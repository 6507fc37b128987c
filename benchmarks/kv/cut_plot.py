"""Mean prefill seconds by the speed of a store: without it, always loading, and loading what is sooner loaded."""

from collections.abc import Mapping, Sequence

from benchmarks.lines import Look, Panel
from benchmarks.lines import draw as draw_panels

_LOOKS = {"always loading": Look("#dc2626"), "sooner loaded": Look("#2563eb", 2.5)}
_MODES = {"always loading": "always", "sooner loaded": "cut"}


def draw(figures: Mapping[str, float], speeds_gb_per_s: Sequence[float]) -> str:
    """Draw both modes, with the device alone as a level line."""
    lines = {
        name: {speed: figures[f"prefill_mean_ms_{mode}_{speed:g}_gb_per_s"] for speed in speeds_gb_per_s}
        for name, mode in _MODES.items()
    }
    level = (figures["prefill_mean_ms_none"], "no store")
    return draw_panels([Panel("mean prefill, ms, by GB/s of a store", lines, _LOOKS, level)])
