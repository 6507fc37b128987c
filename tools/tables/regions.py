"""Ways in which regions help each other, and what their summaries cost."""

from collections.abc import Iterator

from tables.read import figure, of, report, table

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


def _costs() -> Iterator[str]:
    ways = [way for way in _WAYS if figure(_FILE, f"{way}_decision_us") is not None]

    def row(what: str, key: str, form: str, scale: float = 1.0) -> list[str]:
        return [what, *(of(_FILE, f"{way}_{key}", form, scale) for way in ways)]

    def body() -> Iterator[list[str]]:
        yield row("bytes/s on a link, mean of the day", "summary_bytes_per_s", ",.0f")
        yield row("bytes/s, most of one answer", "summary_bytes_per_s_max", ",.0f")
        yield row("chunks advertised by two regions, at the end", "told_chunks", ",.0f")
        yield row("memory of advertised prefixes, in a router, MB", "region_index_bytes", ",.1f", 1e-6)
        yield row("CPU time of an answer, ms", "summary_cpu_ms", ",.1f")
        yield row("CPU time of a decision, us", "decision_us", ",.0f")
        yield row("the same without links, us", "decision_without_links_us", ",.0f")

    workers = report(_FILE)["config"].get("workers", 0)
    return table([f"regions of {workers:,} workers", *(_WAYS[way] for way in ways)], body())


TABLES = {"regions": _ways, "regions-costs": _costs}
