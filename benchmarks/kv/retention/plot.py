"""Prefill seconds saved by the size of the device: by what clients say, and of a tenant's chats beside another's agents."""

from collections.abc import Mapping, Sequence

from benchmarks.lines import Look, Panel
from benchmarks.lines import draw as draw_panels

_SAID = {
    "lru": "mixture_lru_all",
    "seconds": "mixture_seconds_all",
    "names and tools": "mixture_names-and-tools_all",
}
_TENANTS = {
    "alone": "alone_seconds-1_chats",
    "alone on half": "alone-on-half_seconds-1_chats",
    "no share": "beside-agents_seconds-1_chats",
    "share of a half": "beside-agents_seconds-0.5_chats",
}
_COLOURS = ("#111827", "#d97706", "#059669", "#7c3aed", "#2563eb")


def draw(figures: Mapping[str, float], blocks: Sequence[int]) -> str:
    """Draw the whole mixture, and the chats of one tenant beside another's agents."""
    titles = {
        "all of the mixture": (_SAID, {}),
        "a tenant's chats beside agents": (
            _TENANTS,
            {"alone": Look("#9ca3af", dash=True), "alone on half": Look("#6b7280", dash=True)},
        ),
    }
    return draw_panels(
        [
            Panel(
                f"{title}: prefill seconds saved, %, by blocks",
                {
                    name: {size: figures[f"{key}_saved_percent_{size}_blocks"] for size in blocks}
                    for name, key in keys.items()
                },
                {name: Look(colour) for name, colour in zip(keys, _COLOURS, strict=False)} | looks,
            )
            for title, (keys, looks) in titles.items()
        ]
    )
