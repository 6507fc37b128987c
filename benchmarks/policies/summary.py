"""From runs to claims: means over seeds, and ratios between the policy in question and the baselines."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from benchmarks.policies.cells import OVERLOAD, Cell
from benchmarks.policies.comparison import Results

REUSABLE = 0.25
"""Cells whose workload has more to reuse than this count for the comparison with the best single baseline."""
NEAR = 1.03
"""Within so much of the best baseline of a cell counts as equal to it."""
METRICS = ("ttft_mean_s", "ttft_p99_s", "itl_mean_s", "e2e_mean_s", "e2e_p99_s", "hit_share")


@dataclass(frozen=True, slots=True)
class Summary:
    """Means over seeds by cell and policy, and what they say of `subject`. All ratios are of mean TTFT unless named."""

    subject: str
    means: Mapping[Cell, Mapping[str, Mapping[str, float]]]
    figures: Mapping[str, float]
    best_single: str | None


def summarise(results: Results, subject: str) -> Summary:
    """Compare `subject` with every other policy.

    Args:
        results: of all runs.
        subject: the policy in question.
    """
    means = _means(results)
    figures: dict[str, float] = {}
    for (workload, deployment), rate in results.saturation_rps.items():
        figures[f"saturation_rps {workload}/{deployment}"] = rate
    for (workload, deployment), about in results.workloads.items():
        figures[f"reusable_share {workload}/{deployment}"] = about["reusable_share"]
    best_single = None
    if any(subject in by_policy and len(by_policy) > 1 for by_policy in means.values()):
        figures |= _headline(means, subject)
        best_single = _best_single(means, results, subject)
        if best_single is not None:
            figures["ttft_geomean_over_best_single"] = _geomean_ratio(means, results, subject, best_single)
        figures |= _against_the_best(means, subject)
    figures |= _in_trouble(means, subject)  # which needs no others
    failed = sum(run["failed"] for run in results.runs.values())
    figures["failed_requests"] = failed
    return Summary(subject, means, figures, best_single)


def _means(results: Results) -> dict[Cell, dict[str, dict[str, float]]]:
    runs: dict[Cell, dict[str, list[Mapping[str, float]]]] = {}
    for (cell, policy, _), found in sorted(results.runs.items(), key=lambda item: item[0][2]):
        runs.setdefault(cell, {}).setdefault(policy, []).append(found)
    return {
        cell: {
            policy: {name: sum(run[name] for run in seeds) / len(seeds) for name in seeds[0]}
            for policy, seeds in by_policy.items()
        }
        for cell, by_policy in runs.items()
    }


Means = Mapping[Cell, Mapping[str, Mapping[str, float]]]


def _headline(means: Means, subject: str) -> dict[str, float]:
    """Give TTFT and end-to-end ratios of the two best-known policies in the headline cell."""
    found = {}
    for cell, by_policy in means.items():
        if not cell.is_headline or subject not in by_policy:
            continue
        for other in ("round-robin", "least-loaded"):
            if other in by_policy:
                for metric in ("ttft_mean_s", "e2e_mean_s"):
                    name = metric.partition("_")[0]
                    ratio = by_policy[other][metric] / by_policy[subject][metric]
                    found[f"headline_{name}_{other}_over_{subject}"] = ratio
    return found


def _counted(means: Means, results: Results) -> list[Cell]:
    """Give the cells below overload, without trouble, whose reusable share exceeds `REUSABLE`."""
    return [
        cell
        for cell in _plain(means)
        if results.workloads[cell.workload, cell.deployment]["reusable_share"] > REUSABLE
    ]


def _plain(means: Means) -> list[Cell]:
    return [cell for cell in means if cell.trouble is None and cell.load < OVERLOAD]


def _best_single(means: Means, results: Results, subject: str) -> str | None:
    """Name the baseline with the lowest geometric mean; only baselines that ran in every cell count."""
    cells = _counted(means, results)
    if not cells:
        return None
    everywhere = set.intersection(*(set(means[cell]) for cell in cells))
    if subject not in everywhere:
        return None
    return min(
        sorted(everywhere - {subject}),
        key=lambda policy: geometric_mean(means[cell][policy]["ttft_mean_s"] for cell in cells),
        default=None,
    )


def _geomean_ratio(means: Means, results: Results, subject: str, other: str) -> float:
    return geometric_mean(
        means[cell][subject]["ttft_mean_s"] / means[cell][other]["ttft_mean_s"]
        for cell in _counted(means, results)
    )


def _against_the_best(means: Means, subject: str) -> dict[str, float]:
    """Compare the subject with each cell's best baseline, below and in overload."""
    ratios = {cell: _over_best(means[cell], subject) for cell in means if cell.trouble is None}
    below = [ratio for cell, ratio in ratios.items() if cell.load < OVERLOAD and ratio is not None]
    beyond = [ratio for cell, ratio in ratios.items() if cell.load >= OVERLOAD and ratio is not None]
    found = {}
    if below:
        found["cells_near_best_share"] = sum(ratio <= NEAR for ratio in below) / len(below)
        found["ttft_over_best_of_cell_worst"] = max(below)
    if beyond:
        found["overload_ttft_over_best_worst"] = max(beyond)
    return found


def _over_best(by_policy: Mapping[str, Mapping[str, float]], subject: str) -> float | None:
    others = [own["ttft_mean_s"] for policy, own in by_policy.items() if policy != subject]
    if subject not in by_policy or not others:
        return None
    return by_policy[subject]["ttft_mean_s"] / min(others)


def _in_trouble(means: Means, subject: str) -> dict[str, float]:
    """Give the subject's TTFT with trouble over without, and its workers' shares of the load."""
    found: dict[str, float] = {}
    for cell, by_policy in means.items():
        calm = means.get(Cell(cell.workload, cell.deployment, cell.load), {})
        if cell.trouble is None or subject not in by_policy or subject not in calm:
            continue
        own = by_policy[subject]
        for name, value, worst in (
            ("ttft_over_calm_worst", own["ttft_mean_s"] / calm[subject]["ttft_mean_s"], max),
            ("ttft_over_best_worst", _over_best(by_policy, subject), max),
            ("worker_share_min", own["worker_share_min"], min),
            ("worker_share_max", own["worker_share_max"], max),
        ):
            if value is not None:
                key = f"{cell.trouble}_{name}"
                found[key] = worst(found.get(key, value), value)
    return found


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))
