"""A tenant's TTFT beside another one that floods."""

from collections.abc import Iterator

from tables.read import link, of, table

_FLOODS = {
    "1000": "1,000 tokens",
    "1000_40_adapters": "1,000 tokens, 40 adapters",
    "8000": "8,000 tokens",
    "32000": "32,000 tokens",
}


def _tenants() -> Iterator[str]:
    def rows() -> Iterator[list[str]]:
        alone = ", ".join(of("tenants", f"one_alone_ttft_ms_p{rank}") for rank in (50, 99))
        for flood, said in _FLOODS.items():
            key = f"one_flood_{flood}"
            yield [
                said,
                alone,
                ", ".join(of("tenants", f"{key}_ttft_ms_p{rank}") for rank in (50, 99)),
                of("tenants", f"{key}_p50_over_alone", ".2f"),
                of("tenants", f"{key}_p99_over_alone", ".2f"),
                of("tenants", f"{key}_flood_requests_per_s"),
                of("tenants", f"{key}_busy_cores", ".2f"),
                link("tenants"),
            ]

    return table(
        [
            "prompts of the flood",
            "alone p50, p99, ms",
            "beside it",
            "p50 over alone",
            "p99 over alone",
            "answers/s of the flood",
            "busy cores of 2",
            "file",
        ],
        rows(),
    )


TABLES = {"tenants": _tenants}
