"""The best aggregated and disaggregated layouts."""

from collections.abc import Iterator

from tables.read import figure, ratio, report, table, text

_KINDS = ("aggregated", "disaggregated")


def by_tpot() -> Iterator[str]:
    """Requests a second and GPU by the target between tokens."""
    targets = [round(ms) for ms in report("placements")["samples"].get("itl_ms_x8", [])]

    def rows() -> Iterator[list[str]]:
        for devices in (8, 16):
            found = []
            for kind in _KINDS:
                values = [
                    figure("placements", f"{kind}_rps_per_gpu_x{devices}_ttft1000ms_itl{ms}ms")
                    for ms in targets
                ]
                found.append(values)
                yield [f"{devices} GPUs, {kind}", *(text(value, ".2f") for value in values)]
            whole, apart = found
            slower = [figure("placements", f"ratio_slower_x{devices}_ttft1000ms_itl{ms}ms") for ms in targets]
            yield ["*ratio*", *(text(ratio(a, w), ".2f") for a, w in zip(apart, whole, strict=True))]
            yield ["*ratio predicted with worse factors*", *(text(value or None, ".2f") for value in slower)]

    return table(["first token within 1 s; ms TPOT", *map(str, targets)], rows())


TABLES = {"placements": by_tpot}
