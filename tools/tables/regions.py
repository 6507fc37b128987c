"""Ways in which regions help each other."""

from collections.abc import Iterator

from tables.read import figure, of, table

_FILE = "regions"
_WAYS = {
    "alone": "alone",
    "in_turn": "clients ask the regions in turn",
    "load": "links, by load",
    "summary_1k": "and a summary, 1,000 bytes/s",
    "summary_8k": "8,000 bytes/s",
    "summary_64k": "64,000 bytes/s, the default",
    "summary_1m": "1,000,000 bytes/s",
}


def _ways() -> Iterator[str]:
    def body() -> Iterator[list[str]]:
        for way, what in _WAYS.items():
            if figure(_FILE, f"{way}_requests") is None:
                continue
            yield [
                what,
                *(of(_FILE, f"{way}_{key}", ".2f") for key in ("ttft_mean_s", "ttft_p50_s", "ttft_p99_s")),
                of(_FILE, f"{way}_undisturbed_ttft_mean_s", ".2f"),
                of(_FILE, f"{way}_others_during_loss_ttft_p99_s", ".2f"),
                of(_FILE, f"{way}_hit_ratio", ".1f", 100) + " %",
                of(_FILE, f"{way}_crossed_share", ".1f", 100) + " %",
                of(_FILE, f"{way}_lost", ",.0f"),
                of(_FILE, f"{way}_lost_at_the_lost_region", ",.0f"),
            ]

    head = [
        "way", "TTFT, mean", "p50", "p99", "mean before the loss", "p99 of other regions' clients during it", "hit ratio",
        "given to another region", "lost", "lost in the lost region",
    ]  # fmt: skip
    return table(head, body())


TABLES = {"regions": _ways}
