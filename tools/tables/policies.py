"""Routing policies side by side."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from statistics import fmean

from tables.read import report, table, text

POLICIES = (
    "kv",
    "product",
    "thresholds",
    "explore-exploit",
    "linear-blocks",
    "weighted-scores",
    "least-loaded",
    "round-robin",
)
_NAMED = {
    "thresholds": ("prefix-then-load", "baselines.prefix_then_load:PrefixThenLoad"),
    "product": ("product", "baselines.product:Product"),
    "explore-exploit": ("explore-exploit", "baselines.explore_exploit:ExploreExploit"),
    "linear-blocks": ("linear-blocks", "baselines.linear_blocks:LinearBlocks"),
    "weighted-scores": ("weighted-scores", "baselines.weighted_scores:WeightedScores"),
    "kv-without-request-queue": ("kv-without-request-queue", "kv-without-hold"),
    "product-with-request-queue": ("product-with-request-queue", "product-with-hold"),
}
"""What reports call a policy, newer ones first."""
_ABLATIONS = {
    "kv": "kv",
    "without the request queue": "kv-without-request-queue",
    "queue": "kv-without-queue",
    "kv_wait": "kv-without-kv_wait",
    "prefill": "kv-without-prefill",
    "itl": "kv-without-itl",
    "slowdown": "kv-without-slowdown",
    "queue_externality": "kv-without-queue_externality",
    "kv_pressure": "kv-without-kv_pressure",
    "product": "product",
    "product with it": "product-with-request-queue",
}
LOADS = (30, 60, 80, 95, 110)
_MODELS = {"70b-fp8": "70B", "8b-bf16": "8B"}


@cache
def mean(file: str, cell: str, policy: str, metric: str) -> float | None:
    """Give the mean over the seeds; None where it did not run."""
    samples = report(file)["samples"]
    for name in _NAMED.get(policy, (policy,)):
        values = samples.get(f"{cell} {name} {metric}")
        if values:
            return fmean(values)
    return None


def cells(kind: str) -> Iterator[tuple[str, str]]:
    """Yield the cells of both workloads on deployments that end in `kind`, and how to call them."""
    for workload in "SM":
        for model, said in _MODELS.items():
            for load in LOADS:
                yield f"{workload}/{model}{kind}/{load}", f"{workload} {said}, {load} %"


def by_cell() -> Iterator[str]:
    """Mean TTFT in ms, devices only: a row for each cell, the least in bold."""

    def rows() -> Iterator[list[str]]:
        for cell, said in cells(""):
            values = [mean("policies", cell, policy, "ttft_mean_s") for policy in POLICIES]
            known = [value for value in values if value is not None]
            if known:
                least = min(known)
                yield [
                    said,
                    *(
                        f"**{text(1e3 * value, ',.0f')}**"
                        if value == least
                        else text(value and 1e3 * value, ",.0f")
                        for value in values
                    ),
                ]

    return table(["cell", *POLICIES], rows())


def geomean(
    workload: str, kind: str, other: str, loads: Sequence[int], metric: str = "ttft_mean_s"
) -> float | None:
    """Give `kv` over another policy, geometric mean over both models and these loads."""
    logs = []
    for model in _MODELS:
        for load in loads:
            cell = f"{workload}/{model}{kind}/{load}"
            own, its = mean("policies", cell, "kv", metric), mean("policies", cell, other, metric)
            if own and its:
                logs.append(math.log(own / its))
    return math.exp(fmean(logs)) if logs else None


_WORKLOADS = (("S", "S", ""), ("M", "M", ""), ("S, host tier", "S", "-host"), ("M, host tier", "M", "-host"))


def over_others(loads: Sequence[int]) -> Callable[[], Iterator[str]]:
    others = [name for name in POLICIES if name != "kv"]

    def rows() -> Iterator[list[str]]:
        for said, workload, kind in _WORKLOADS:
            yield [said, *(text(geomean(workload, kind, other, loads), ".2f") for other in others)]

    return lambda: table(["workload", *others], rows())


def split() -> Iterator[str]:
    """`kv` over the best single baseline, at loads that it carries and beyond."""

    def rows() -> Iterator[list[str]]:
        for metric, said in (("ttft_mean_s", "TTFT"), ("itl_mean_s", "TPOT"), ("e2e_mean_s", "end to end")):
            for loads, when in (((30, 60, 80), "up to 80 %"), ((95,), "95 %"), ((110,), "110 %")):
                yield [
                    f"{said}, {when}",
                    *(
                        text(geomean(workload, kind, "product", loads, metric), ".2f")
                        for _, workload, kind in _WORKLOADS
                    ),
                ]

    return table(["mean over `product`'s", *(said for said, *_ in _WORKLOADS)], rows())


def ablations() -> Iterator[str]:
    """Mean TTFT in ms of `kv` less its parts."""
    found = report("policies_ablations")["config"].get("cells", [])

    def rows() -> Iterator[list[str]]:
        for cell in found:
            workload, model, load = cell.split("/")
            values = [
                mean("policies_ablations", cell, policy, "ttft_mean_s") for policy in _ABLATIONS.values()
            ]
            yield [
                f"{workload} {_MODELS[model]}, {load} %",
                *(text(value and 1e3 * value, ",.0f") for value in values),
            ]

    return table(["cell", *_ABLATIONS], rows())


def routers() -> Iterator[str]:
    """First tokens with four frontends over those with one."""
    figures = report("routers")["figures"]

    def rows() -> Iterator[list[str]]:
        for workload in "SM":
            for model, said in _MODELS.items():
                row = [f"{workload}, {said}"]
                for load in (60, 80, 95):
                    key = f"{workload}/{model}/{load} ttft"
                    row.append(
                        ", ".join(text(figures.get(f"{key}_{what}_ratio"), ".2f") for what in ("mean", "p99"))
                    )
                yield row

    return table(["", "60 % of saturation", "80 %", "95 %"], rows())


def saturation() -> Iterator[str]:
    """Requests a second that the best policy just sustains, in the run of the cells and in that of several frontends."""
    figures, several = report("policies")["figures"], report("routers")["config"].get("saturation_rps", {})

    def rows() -> Iterator[list[str]]:
        for workload in "SM":
            for model, said in _MODELS.items():
                rates = [figures.get(f"saturation_rps {workload}/{model}{kind}") for kind in ("", "-host")]
                yield [
                    f"{workload} {said}",
                    *(text(rate) for rate in (*rates, several.get(f"{workload}/{model}"))),
                ]

    return table(["saturation, requests/s", "devices only", "host tier", "in `bench routers`"], rows())


def host_again() -> Iterator[str]:
    """Mean TTFT in ms with host tiers in a later run at the same rates, beside that of the first run."""
    known = report("policies_host")["config"].get("cells", [])

    def rows() -> Iterator[list[str]]:
        for cell, said in cells("-host"):
            if cell not in known:
                continue
            row = [said]
            for file in ("policies_host", "policies"):
                own, other = (mean(file, cell, policy, "ttft_mean_s") for policy in ("kv", "product"))
                row += [text(value and 1e3 * value, ",.0f") for value in (own, other)]
                row.append(text(own / other if own and other else None, ".2f"))
            yield row

    return table(["cell", "kv", "product", "ratio", "kv on 2026-11-22", "product", "ratio"], rows())


TABLES = {
    "policies-host-again": host_again,
    "policies-saturation": saturation,
    "policies-ratios-carried": over_others((30, 60, 80)),
    "policies-split": split,
    "policies-ttft": by_cell,
    "policies-ablations": ablations,
    "routers": routers,
}
