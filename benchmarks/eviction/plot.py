"""Share of prefill seconds saved by the size of the pool, a line for each policy."""

import re
from collections.abc import Mapping

from benchmarks.lines import Look, Panel
from benchmarks.lines import draw as draw_panels

_LOOKS = {
    "seconds": Look("#2563eb", 2.5),
    "lru": Look("#111827"),
    "offline": Look("#9ca3af", dash=True),
}
_KEY = re.compile(r"trace_([a-z0-9-]+)_saved_percent_(\d+)_blocks")


def draw(figures: Mapping[str, float]) -> str:
    """Draw the figures of the trace; an empty panel without any."""
    lines: dict[str, dict[float, float]] = {}
    for name, value in figures.items():
        match = _KEY.fullmatch(name)
        if match is not None:
            lines.setdefault(match[1], {})[int(match[2])] = value
    return draw_panels([Panel("prefill seconds saved, %, by blocks of 512 tokens", lines, _LOOKS)])
