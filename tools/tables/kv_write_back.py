"""What is written to a tier as requests leave and before evictions, and what comes back from it."""

from collections.abc import Iterator

from tables.read import of, report, table

_NAME = "kv_write_back"
_MODES = ("write-through", "write-back")


def _table() -> Iterator[str]:
    kinds = report(_NAME)["config"].get("kinds", ())

    def row(kind: str) -> list[str]:
        def both(figure: str, form: str) -> list[str]:
            return [of(_NAME, f"{figure} {kind} {mode}", form) for mode in _MODES]

        return [
            kind,
            *both("written_mb", ".1f"),
            *both("dropped_blocks", ",.0f"),
            *both("cached_share", ".1%"),
            *both("ttft_mean_ms", ",.0f"),
        ]

    columns = [
        f"{what}, {mode}"
        for what in ("MB written", "shed blocks", "hits", "TTFT in ms")
        for mode in ("through", "back")
    ]
    return table(["traffic, tier", *columns], (row(kind) for kind in kinds))


TABLES = {"kv-write-back": _table}
