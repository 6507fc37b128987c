"""Why Penstock, in figures: the table of README, each figure beside the peer that was measured with it, losses too.

A cell has the least and the most of all runs, shapes or loads of its row, and `Penstock is` the worst and the best ratio of a pair.
"""

from collections.abc import Iterator

from tables.disagg import RUNS, side
from tables.policies import cells, mean
from tables.read import NONE, figure, of, report, table, text

_CARRIED = (30, 60, 80)
_FRONTENDS = ("frontend_again", "frontend")
_FORMULAS = {"linear-blocks": "Dynamo", "product": "LMetric"}
_LOADS = ("larger", "fitting")
_SHAPES = ("1x128MiB", "2048x32KiB", "512x256KiB", "128x1MiB")
_TRANSPORTS = (("shm", "nixl"), ("tcp", "nixl_tcp"))
_TTFT = "ttft_mean_s"

FILES = (
    "vllm",
    "router",
    "vllm_overhead",
    "chaos",
    *(run.file for run in RUNS),
    "transfer",
    *_FRONTENDS,
    "policies",
    "simulate",
)
"""The files that the table is made from."""

_Pairs = list[tuple[float | None, ...]]
"""What Penstock and its peer had, of each run, shape or cell."""


def _ends(values: list[float], form: str = ",.3g") -> str:
    """Write the least and the most; where both are the same, one of them."""
    return " to ".join(dict.fromkeys((text(min(values), form), text(max(values), form))))


def _as_words(ratio: float, better: str, worse: str) -> str:
    return f"{ratio:.2f} x {better}" if ratio >= 1 else f"{1 / ratio:.2f} x {worse}"


def _range(ratios: list[float], better: str, worse: str) -> str:
    """Write the worst and the best ratio in words; below 1 the other way round, as `worse`."""
    low, high = (_as_words(ratio, better, worse) for ratio in (min(ratios), max(ratios)))
    if low == high:
        return low
    if min(ratios) < 1 <= max(ratios):
        return f"{low} to {high}"
    first, last = sorted((low, high), key=lambda words: float(words.split()[0]))
    return f"{first.split()[0]} to {last}"


def _row(
    why: str, measured: str, pairs: _Pairs, words: tuple[str, str], *, peer: str, files: str, unit: str = ""
) -> list[str]:
    """Make a row; `words` say that Penstock is better and worse."""
    known = [(ours, theirs) for ours, theirs in pairs if ours and theirs]
    if not known:
        return [why, measured, NONE, f"{NONE}, {peer}", NONE, files]
    is_less_better = words[0] in {"shorter", "lower"}
    ratios = [theirs / ours if is_less_better else ours / theirs for ours, theirs in known]
    form = ",.3g" if unit else ",.0f"
    ours, theirs = (_ends([pair[which] for pair in known], form) + unit for which in (0, 1))
    return [why, measured, ours, f"{theirs}, {peer}", _range(ratios, *words), files]


def _link(name: str) -> str:
    return f"[{name}](benchmarks/results/{name}.json)"


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def _prefixes() -> Iterator[list[str]]:
    hits: _Pairs = [
        (figure("vllm", f"kv_{load}_hit_tokens"), figure("vllm", f"round_robin_{load}_hit_tokens"))
        for load in _LOADS
    ]
    yield _row(
        "**Prompts go where they are cached**", "prompt tokens found in the caches of two vLLM workers, two loads",
        hits, ("more", "fewer"), peer="round-robin", files=_link("vllm"),
    )  # fmt: skip
    lookups: _Pairs = [
        (figure("router", f"router_lookups_per_s_w{count}"), figure("router", f"peer_lookups_per_s_w{count}"))
        for count in (8, 64, 512)
    ]
    yield _row(
        "", "lookups/s of the prefix index, 1,000,000 (worker, block) pairs on 8 to 512 workers",
        lookups, ("faster", "slower"), peer="the tree of Dynamo 1.6.1", files=_link("router"),
    )  # fmt: skip
    for policy, said in _FORMULAS.items():
        carried = [cell for cell, _ in cells("") if int(cell.rpartition("/")[2]) in _CARRIED]
        found: _Pairs = [
            (_ms(mean("policies", cell, "kv", _TTFT)), _ms(mean("policies", cell, policy, _TTFT)))
            for cell in carried
        ]
        yield _row(
            "", f"mean TTFT, {len(found)} simulated loads of 8B and 70B on H100, 30 to 80 % of saturation",
            found, ("shorter", "longer"), unit=" ms", peer=f"the formula of {said}", files=_link("policies"),
        )  # fmt: skip
    samples = report("vllm_overhead")["samples"]
    for measured, key, unit, words in (
        ("*loss*: tokens/s, 32 streams at one vLLM, six pairs", "tokens_per_s_c32", "", ("faster", "slower")),
        ("*loss*: TTFT of a single stream there", "ttft_ms_c1", " ms", ("shorter", "longer")),
    ):
        pairs = zip(samples.get(f"penstock_{key}", ()), samples.get(f"vllm_{key}", ()), strict=True)
        yield _row(
            "", measured, list(pairs), words, unit=unit, peer="`vllm serve`", files=_link("vllm_overhead")
        )


def _streams() -> Iterator[list[str]]:
    streams, exact = (of("vllm", f"killed_streams{end}", ",.0f") for end in ("", "_exact"))
    yield [
        "**Streams survive dead workers**", "one of two vLLM workers killed: streams that end with the right tokens",
        f"{exact} of {streams}, longest gap {of('vllm', 'killed_longest_gap_ms')} ms", "not measured", "", _link("vllm"),
    ]  # fmt: skip
    requests, faults = (of("chaos", f"chaos_{what}", ",.0f") for what in ("completed", "faults"))
    lost = ", ".join(of("chaos", f"chaos_{kind}", ",.0f") for kind in ("lost", "wrong", "repeated"))
    yield [
        "", f"{requests} requests, {faults} faults, 8 mock workers on 4 hosts: lost, wrong, repeated",
        f"{lost}; {of('chaos', 'chaos_excused', ',.0f')} more asked again, as their frontend was killed", "not measured", "", _link("chaos"),
    ]  # fmt: skip


def _disaggregation() -> Iterator[list[str]]:
    runs = [side(run) for run in RUNS]
    for why, measured, at, unit in (
        ("**Prefill apart from decode**", f"ITL p99 of streams beside long prompts, on CPUs, {len(runs)} runs", 0, " ms"),
        ("", "*loss*: TTFT p99 of the long prompts", 3, " s"),
    ):  # fmt: skip
        pairs: _Pairs = [(run.disaggregated[at], run.aggregated[at]) for run in runs]
        yield _row(
            why, measured, pairs, ("shorter", "longer"), unit=unit, peer="2 aggregated workers of Penstock",
            files="[disagg](docs/benchmarks.md#disaggregation)",
        )  # fmt: skip
    large: _Pairs = [
        tuple(figure("transfer", f"{who}_{way}_{shape}_gb_per_s") for who in sides)
        for sides in _TRANSPORTS
        for way in ("read", "write")
        for shape in _SHAPES
    ]
    yield _row(
        "", "KV by shared memory and TCP, pieces of 32 KiB to 128 MiB",
        large, ("faster", "slower"), unit=" GB/s", peer="NIXL 1.5.1", files=_link("transfer"),
    )  # fmt: skip
    small: _Pairs = [tuple(figure("transfer", f"{who}_4KiB_us") for who in sides) for sides in _TRANSPORTS]
    yield _row(
        "", "*loss*: 4 KiB by the same", small, ("shorter", "longer"), unit=" us", peer="NIXL 1.5.1", files=_link("transfer")
    )  # fmt: skip


def _frontend() -> Iterator[list[str]]:
    files = ", ".join(map(_link, _FRONTENDS))
    for why, measured, keys, unit, words in (
        (
            "**A light frontend**", "CPU time of 1,000 answers, streamed (in fewer events) or whole, two runs",
            ("stream_cpu_s_per_1000", "unary_cpu_s_per_1000"), " s", ("lower", "higher"),
        ),
        ("", "*loss*: first byte of a single stream, median", ("ttfb_ms_p50_c1",), " ms", ("shorter", "longer")),
        ("", "*loss*: first byte of 256 streams at once, p99", ("ttfb_ms_p99_c256",), " ms", ("shorter", "longer")),
    ):  # fmt: skip
        pairs: _Pairs = [
            (figure(name, f"ours_{key}"), figure(name, f"peer_{key}")) for name in _FRONTENDS for key in keys
        ]
        yield _row(why, measured, pairs, words, unit=unit, peer="Dynamo 1.6.1", files=files)


def _simulation() -> Iterator[list[str]]:
    yield [
        "**Simulate before you buy**", "`penstock simulate`, with the real router: 100,000 requests on 1,000 workers",
        f"{of('simulate', 'simulate_scale_s', ',.0f')} s", "not measured", "", _link("simulate"),
    ]  # fmt: skip


def why() -> Iterator[str]:
    rows = (row for part in (_prefixes, _streams, _disaggregation, _frontend, _simulation) for row in part())
    return table(["why", "measured", "Penstock", "peer", "Penstock is", "file"], rows)


TABLES = {"why": why}
