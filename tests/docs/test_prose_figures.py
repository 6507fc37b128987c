"""Figures in sentences are those of benchmarks/results, and sizes those of tools/install.py; `test_tables` has the tables."""

import statistics
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from install import SIZES_GB  # noqa: E402 - beside the tests, not a package
from tables.read import figure, report, text  # noqa: E402
from tables.readme import FILES  # noqa: E402

STARTS = [
    ("planner_azure", "trace_8b_start60"),
    ("planner_azure_70b", "trace_70b_start60"),
    ("planner_azure", "trace_8b_start300"),
    ("planner_azure_70b", "trace_70b_start300"),
]
DAY = [("planner_day", "diurnal_70b_start60")]
LONG_DAY = [("planner_day_300", "diurnal_70b_start300")]
GROWING, ALTERNATING = "growing_8b_start60", "alternating_8b_start300"


def some(name: str, key: str, scale: float = 1.0) -> float:
    value = figure(name, key, scale)
    assert value is not None, f"{name}.json has no {key}"
    return value


def least_and_most(values: Iterable[float], form: str = ".2f") -> str:
    """Write two figures; where both are the same, one of them."""
    found = sorted(values)
    ends = dict.fromkeys((text(found[0], form), text(found[-1], form)))
    return " to ".join(ends)


def over(cases: Iterable[tuple[str, str]], other: str) -> list[float]:
    return [some(name, f"{case}_gpu_hours_over_{other}") for name, case in cases]


def listed(values: Iterable[float], form: str = ".2f") -> str:
    """Write `1, 2 and 3`."""
    *first, last = (text(value, form) for value in values)
    return f"{', '.join(first)} and {last}"


def readme() -> Iterator[str]:
    assert {report(name)["machine"]["cores"] for name in FILES} == {2}
    yield "It was all measured on two CPU cores without a GPU, or in simulation where the row says so."
    yield f"downloads {size('demo', 'cpu', 0)} into .venv"
    yield f"With an NVIDIA GPU it downloads {size('demo', 'pypi', 0)}, for PyTorch's build for GPUs"


def quickstart() -> Iterator[str]:
    for build, said in (("cpu", "for CPUs"), ("pypi", "for GPUs")):
        yield f"| {said} | {size('demo', build, 0)} | {size('demo', build, 1)} |"


def contributing() -> Iterator[str]:
    yield f"{size('dev', 'cpu', 0)} to download, {size('dev', 'cpu', 1)} on disk"


def size(what: str, build: str, which: int) -> str:
    """Write the GB that `make` says it downloads (0) or needs on the disk (1)."""
    return f"{SIZES_GB[what, build][which]:.1f} GB"


def vllm() -> Iterator[str]:
    shares = [
        100 * some("vllm", f"{policy}_larger_hit_tokens") / some("vllm", f"{policy}_larger_prompt_tokens")
        for policy in ("kv", "round_robin")
    ]
    yield (
        f"With the larger load {shares[0]:.0f} % of the prompt tokens were hits under `kv`, and {shares[1]:.0f} % under `round-robin`."
    )
    yield f"and the ratio is {some('vllm', 'fitting_hit_tokens_kv_over_round_robin'):.2f}."
    samples = report("vllm_overhead")["samples"]
    ratios = [
        ours / theirs
        for ours, theirs in zip(
            samples["penstock_tokens_per_s_c32"], samples["vllm_tokens_per_s_c32"], strict=True
        )
    ]
    quarters = (
        some("vllm_overhead", f"tokens_per_s_over_vllm_{part}") for part in ("quarter", "three_quarters")
    )
    low, high = (text(value, ".2f") for value in quarters)
    count = {6: "six"}[len(ratios)]
    yield (
        f"the {count} pairs of rounds gave ratios from {least_and_most(ratios)}, half of them between {low} and {high}; "
        f"their median is {statistics.median(ratios):.2f}."
    )
    worker, theirs = (some("vllm_overhead", f"{who}_api_cpu_us_per_token") for who in ("penstock", "vllm"))
    core = some("vllm_overhead", "penstock_core_cpu_us_per_token") - some(
        "vllm_overhead", "vllm_core_cpu_us_per_token"
    )
    yield (
        f"Worker and frontend take {round(worker) - round(theirs)} us of CPU time a token more than vLLM's API server, "
        f"and the engine core {core:.0f} us more than without Penstock"
    )


def transfer() -> Iterator[str]:
    def ratios(backend: str, ways: Iterable[str], shapes: Iterable[str], peer: str) -> list[float]:
        return [some("transfer", f"{backend}_{way}_{shape}_over_{peer}") for way in ways for shape in shapes]

    shapes = ("1x128MiB", "2048x32KiB", "512x256KiB", "128x1MiB")
    writes, reads = (ratios("shm_private", [way], shapes, "memcpy") for way in ("write", "read"))
    yield f"`shm_private` against memcpy ({least_and_most(writes)} writing, {least_and_most(reads)} reading:"
    nixl = ratios("ours_nixl", ("write", "read"), shapes, "nixl")
    yield f"NIXL as a transport of Penstock against NIXL by itself ({least_and_most(nixl)})"
    yield f"writing 32 KiB ({ratios('file', ['write'], ['2048x32KiB'], 'fio')[0]:.2f})"
    named = ("shm_private_", "ours_nixl_", "file_write_2048x32KiB_over_fio")
    below = [key for key, value in report("transfer")["figures"].items() if "_over_" in key and value < 0.985]
    assert [key for key in below if not key.startswith(named)] == []  # "Ratios below 1"


def many_machines() -> Iterator[str]:
    reads = some("scale", "decisions_per_s")
    yield f"so that the {round(reads, -1):.0f} requests/s of each of these 8"


def planner() -> Iterator[str]:
    start60, start300 = STARTS[:2], STARTS[2:]
    (whole,) = {f"{100 * value:.0f}" for value in over(start60, "static_peak")}
    yield f"{whole} % of static capacity for the peak with starts of 60 s"
    assert all(0.97 < value < 1.03 for value in over(start300, "static_peak"))  # "all of it"
    yield (
        f"Of the autoscaler it takes {least_and_most(over(STARTS, 'autoscaler'))} ({over(DAY, 'autoscaler')[0]:.2f} on the day), "
        f"of interpolation with the factor that is best in hindsight {least_and_most(over(STARTS, 'interpolation'))} "
        f"({over(DAY, 'interpolation')[0]:.2f}), and of the oracle {least_and_most(over(STARTS, 'oracle'))} ({over(DAY, 'oracle')[0]:.2f};"
    )
    mooncake = over([("planner_mooncake", f"trace_8b_start{start}") for start in (60, 300)], "static_peak")
    yield f"On Mooncake's hour it takes {listed((100 * value - 100 for value in mooncake), '.0f')} % more than static capacity"
    others = ("autoscaler", "interpolation", "oracle")
    for said, case in (("where prompts grow", GROWING), ("and between documents and chats", ALTERNATING)):
        yield f"{said} {listed(some('planner', f'{case}_gpu_hours_over_{other}') for other in others)}"
    chosen = [
        100
        - 100
        * some("planner", f"{case}_gpu_hours_over_planner")
        / some("planner", f"{case}_gpu_hours_over_planner_switching")
        for case in (GROWING, ALTERNATING)
    ]
    yield f"Choosing between aggregated and disaggregated saves {listed(chosen, '.0f')} %"
    flips = 100 - 100 * some("planner", f"{ALTERNATING}_gpu_hours_over_planner_without_flips")
    yield f"they save {flips:.0f} % of the GPU-hours"
    yield f"at {100 * some('planner', f'{GROWING}_gpu_hours_over_static_peak'):.0f} % of static capacity"
    held = some("planner_day", "diurnal_70b_start60_planner_attainment", 100)
    yield f"it takes {100 * over(DAY, 'static_peak')[0]:.0f} % of static capacity for the peak (aim 60 %), and holds {held:.2f} %"
    yield f"it holds {some('planner_day_300', 'diurnal_70b_start300_planner_attainment', 100):.1f} % and misses its aim"
    yield f"so {listed(over(LONG_DAY, 'autoscaler') + over(LONG_DAY, 'interpolation'))} of the"


def eviction() -> Iterator[str]:
    def saved(part: str, policy: str, blocks: int) -> str:
        return text(some("eviction", f"{part}_{policy}_saved_percent_{blocks}_blocks"), ".1f")

    first, second = (
        [saved(f"trace-{half}-half", "seconds", blocks) for blocks in (3000, 10000)]
        for half in ("first", "second")
    )
    yield f"the first half has {' and '.join(first)} %, the second {' and '.join(second)} %"


def regions() -> Iterator[str]:
    def of_alone(key: str) -> float:
        return some("regions", f"alone_{key}") / some("regions", f"summary_64k_{key}")

    parts = {7: "a seventh", 8: "an eighth"}
    yield f"the median prompt waits {parts[round(of_alone('ttft_p50_s'))]} of what it waits without links"
    yield f"The link uses {parts[round(64_000 / some('regions', 'summary_64k_summary_bytes_per_s'))]} of its bytes"
    assert all(
        figure("regions", f"{way}_lost") == 0 for way in ("load", "in_turn", "summary_64k", "summary_1m")
    )
    yield "No request of a region that was there is lost."


def rerun() -> Iterator[str]:
    """Three cells of the routing comparison, run again."""

    def ms(name: str, cell: str, policy: str) -> float:
        return 1e3 * statistics.mean(report(name)["samples"][f"{cell}/80 {policy} ttft_mean_s"])

    cells = {"S 8B at 80 %": "S/8b-bf16", "M 8B": "M/8b-bf16", "M 70B": "M/70b-fp8"}
    said, ratios = [], {"policies_rerun_80": [], "policies": []}
    for label, cell in cells.items():
        now = [ms("policies_rerun_80", cell, policy) for policy in ("kv", "product")]
        before = [ms("policies", cell, policy) for policy in ("kv", "baselines.product:Product")]
        said.append(
            f"{label} "
            + " and ".join(f"{new:,.0f} ({old:,.0f})" for new, old in zip(now, before, strict=True))
        )
        ratios["policies_rerun_80"].append(now[0] / now[1])
        ratios["policies"].append(before[0] / before[1])
    yield ", ".join(said)
    yield f"`kv` has {listed(ratios['policies_rerun_80'])} of `product`'s, and had {listed(ratios['policies'])}."


CLAIMS = [
    (page, claim)
    for page, parts in {
        "README.md": (readme,),
        "CONTRIBUTING.md": (contributing,),
        "docs/quickstart.md": (quickstart,),
        "docs/benchmarks.md": (vllm, transfer, many_machines, regions, planner, eviction, rerun),
    }.items()
    for part in parts
    for claim in part()
]


@pytest.mark.parametrize(("page", "claim"), CLAIMS, ids=[claim[:50] for _, claim in CLAIMS])
def test_a_sentence_has_the_figures_of_its_file(page: str, claim: str) -> None:
    """Else write the sentence anew: what it says may have changed with the figures."""
    assert claim in " ".join((ROOT / page).read_text(encoding="utf-8").split())
