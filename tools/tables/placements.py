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


def by_ttft() -> Iterator[str]:
    """The ratio by the target of the first token, at 30 ms."""

    def rows() -> Iterator[list[str]]:
        for devices in (8, 16):
            keys = [f"ratio_x{devices}_ttft{ms}ms_itl30ms" for ms in (500, 1000, 2000)]
            yield [f"{devices} GPUs, *ratio*", *(text(figure("placements", key), ".2f") for key in keys)]

    return table(["30 ms TPOT; first token within", "0.5 s", "1 s", "2 s"], rows())


def parts() -> Iterator[str]:
    """What explains the ratio: steps beside 32 streams, and what a prompt takes in them."""
    sizes = (128, 256, 512, 1024)

    def rows() -> Iterator[list[str]]:
        for tp in (2, 4, 8):
            alone = figure("placements", f"prompt_gpu_s_tp{tp}_alone")
            decode = figure("placements", f"decode_step_ms_tp{tp}_batch32")
            mixed = (
                ", ".join(
                    text(figure("placements", f"{key}_tp{tp}_{size}"), form)
                    for key, form in (("mixed_step_ms", ".0f"), ("prompt_gpu_s", ".2f"))
                )
                for size in sizes
            )
            yield [f"TP {tp}", text(alone, ".2f"), text(decode, ".0f"), *mixed]

    head = ["", "GPU-seconds of a prompt in one step", "ms of a step of 32 streams", *(f"with {size:,} tokens: ms, GPU-seconds" for size in sizes)]  # fmt: skip
    return table(head, rows())


TABLES = {"placements-parts": parts, "placements": by_tpot, "placements-ttft": by_ttft}
