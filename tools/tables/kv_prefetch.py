"""TTFT where prefixes are loaded while their requests wait, and where they are not."""

from collections.abc import Iterator

from tables.read import of, report, table

_FILE = "kv_prefetch"
_TIERS = {"host": "host, 40 GB/s", "disk": "disk, 5 GB/s", "object": "object store, 1 GB/s"}
_METRICS = {"ttft_mean_s": "TTFT, mean", "reusing_ttft_mean_s": "of requests that reuse a quarter or more"}


def _table() -> Iterator[str]:
    parts = report(_FILE)["config"].get("parts", 0)

    def rows() -> Iterator[list[str]]:
        for tier, said in _TIERS.items():
            for metric, what in _METRICS.items():
                without, with_it = (
                    of(_FILE, f"{metric} {tier} {mode}", ".2f") for mode in ("without", "with")
                )
                change, least, most = (
                    of(_FILE, f"{metric} {tier} {name}", "+.1f", 100)
                    for name in ("change", "change_least", "change_most")
                )
                yield [said, what, f"{without} s", f"{with_it} s", f"{change} %", f"{least} to {most} %"]

    return table(
        ["one tier", "", "when its turn comes", "while it waits", "change", f"in each of {parts} parts"],
        rows(),
    )


TABLES = {"kv-prefetch": _table}
