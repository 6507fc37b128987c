"""What always loading from a slow store costs, and what the cut gives back."""

from collections.abc import Iterator

from tables.read import of, report, table


def _table() -> Iterator[str]:
    speeds = [f"{speed:g}" for speed in report("kv_cut")["config"].get("speeds_gb_per_s", ())]

    def rows() -> Iterator[list[str]]:
        yield ["without a store", *([of("kv_cut", "prefill_mean_ms_none", ",.0f")] * len(speeds))]
        for mode, said in (("always", "always loading"), ("cut", "loading what is sooner loaded")):
            yield [
                said,
                *(of("kv_cut", f"prefill_mean_ms_{mode}_{speed}_gb_per_s", ",.0f") for speed in speeds),
            ]

    return table(["mean prefill (ms)", *(f"{speed} GB/s" for speed in speeds)], rows())


TABLES = {"kv-cut": _table}
