"""Whole requests against prefill and decode apart."""

from collections.abc import Iterator

from tables.read import figure, ratio, report, table, text

_KINDS = (("whole requests", "aggregated"), ("apart", "disaggregated"))


def by_tpot() -> Iterator[str]:
    """Requests a second and GPU by the target between tokens."""
    targets = [round(ms) for ms in report("placements")["samples"].get("itl_ms_x8", [])]

    def rows() -> Iterator[list[str]]:
        for devices in (8, 16):
            found = []
            for said, kind in _KINDS:
                values = [
                    figure("placements", f"{kind}_rps_per_gpu_x{devices}_ttft1000ms_itl{ms}ms")
                    for ms in targets
                ]
                found.append(values)
                yield [f"{devices} GPUs, {said}", *(text(value, ".2f") for value in values)]
            whole, apart = found
            yield ["*ratio*", *(text(ratio(a, w), ".2f") for a, w in zip(apart, whole, strict=True))]

    return table(["first token within 1 s; ms TPOT", *map(str, targets)], rows())


def by_ttft() -> Iterator[str]:
    """The ratio by the target of the first token, at 30 ms."""

    def rows() -> Iterator[list[str]]:
        for devices in (8, 16):
            keys = [f"ratio_x{devices}_ttft{ms}ms_itl30ms" for ms in (500, 1000, 2000)]
            yield [f"{devices} GPUs, *ratio*", *(text(figure("placements", key), ".2f") for key in keys)]

    return table(["30 ms TPOT; first token within", "0.5 s", "1 s", "2 s"], rows())


TABLES = {"placements": by_tpot, "placements-ttft": by_ttft}
