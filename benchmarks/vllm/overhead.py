"""What Penstock costs over vLLM's own server: tokens per second, TTFT, and CPU time of each process by token.

Both servers run; one load goes to each in short rounds, A B B A, so that a machine that is busy for a while is so for both.
The figure is the median over pairs of rounds. Two cores carry engine, API and client, so CPU time is throughput.
"""

import argparse
import contextlib
import statistics
import time

import psutil

from benchmarks.processes.served import Served, put_load
from benchmarks.vllm.servers import BLOCK, CONTEXT, checkpoint, described, penstock, vllm
from penstock.bench.report import BenchReport
from penstock.core.errors import ConfigError, Unavailable

_CONCURRENCY = 32
_REQUESTS, _OUTPUT_TOKENS = 128, 64
_ALONE, _ALONE_TOKENS = 10, 8
_OTHER_PROMPTS = 1000
_PAUSE_S = 1.5
"""Between rounds: vLLM's processes poll for about a second after their last request."""
_BLOCKS = 4 * CONTEXT // BLOCK * 2
_PARTS = {"worker-1": "worker", "frontend-1": "frontend", "VLLM::EngineCore": "core", "VLLM::Worker": "model"}
"""Names of processes, and what they are in the figures."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pairs", type=int, metavar="N", help="rounds of each server (default 12)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and prompts (default 0)")


def run(options: argparse.Namespace) -> BenchReport:
    """Measure in pairs.

    Raises:
        ConfigError: vLLM or the packages for its checkpoint are not installed, or `--pairs` makes no sense.
    """
    pairs = options.pairs if options.pairs is not None else (1 if options.quick else 12)
    if pairs < 1:
        raise ConfigError(f"--pairs: must be >= 1, got {pairs}")
    samples: dict[str, list[float]] = {}
    with checkpoint(options.seed) as model, penstock(model, _BLOCKS, workers=1, policy="kv") as ours:
        our_processes = _children()
        with vllm(model, _BLOCKS) as theirs:
            others = [process for process in _children() if process not in our_processes]
            sides = [("penstock", ours, our_processes), ("vllm", theirs, others)]
            for number in range(-1, pairs):
                for name, server, processes in sides if number % 2 else reversed(sides):
                    found = _round(name, server, processes, options.seed + number + 1)
                    if number >= 0:  # the first pair warms up
                        for key, value in found.items():
                            samples.setdefault(f"{name}_{key}", []).append(value)
    return BenchReport(
        name="vllm-overhead",
        config=described(_BLOCKS)
        | {
            "concurrency": _CONCURRENCY,
            "requests": _REQUESTS,
            "output_tokens": _OUTPUT_TOKENS,
            "requests_alone": _ALONE,
            "pairs": pairs,
            "seed": options.seed,
            "quick": options.quick,
        },
        samples=samples,
        figures=_figures(samples),
    )


def _round(name: str, server: Served, processes: list[psutil.Process], seed: int) -> dict[str, float]:
    """Put the load on one server, then a few requests one by one.

    Raises:
        Unavailable: a request failed.
    """
    common = {"endpoint": "completions", "input-tokens": 128, "seed": seed}
    before = _cpu_s(processes)
    busy = put_load(
        server,
        common | {"requests": _REQUESTS, "concurrency": _CONCURRENCY, "output-tokens": _OUTPUT_TOKENS},
    )
    after = _cpu_s(processes)
    alone = put_load(
        server,
        common
        | {
            "seed": seed + _OTHER_PROMPTS,
            "requests": _ALONE,
            "concurrency": 1,
            "output-tokens": _ALONE_TOKENS,
        },
    )
    for report in (busy, alone):
        if report.problems:
            raise Unavailable(f"{name}: {report.problems[0]}")
    time.sleep(_PAUSE_S)
    tokens = _REQUESTS * _OUTPUT_TOKENS
    return {
        "tokens_per_s_c32": busy.figures["output_tokens_per_s"],
        "ttft_ms_c32": busy.figures["ttft_ms_p50"],
        "ttft_ms_c1": alone.figures["ttft_ms_p50"],
    } | {f"{part}_cpu_us_per_token": (after[part] - before[part]) / tokens * 1e6 for part in after}


def _children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def _cpu_s(processes: list[psutil.Process]) -> dict[str, float]:
    """Give CPU seconds so far by part; `api` is vLLM's API server, or Penstock's worker and frontend."""
    found = {"api": 0.0, "core": 0.0, "model": 0.0}
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            times, part = process.cpu_times(), _PARTS.get(process.name(), "api")
            for key in {part, "api"} if part in {"worker", "frontend"} else {part}:
                found[key] = found.get(key, 0.0) + times.user + times.system
    return found


def _figures(samples: dict[str, list[float]]) -> dict[str, float]:
    figures = {name: statistics.median(values) for name, values in samples.items()}
    rates = samples["penstock_tokens_per_s_c32"], samples["vllm_tokens_per_s_c32"]
    ratios = sorted(ours / theirs for ours, theirs in zip(*rates, strict=True))
    figures["tokens_per_s_over_vllm"] = statistics.median(ratios)
    low, high = _quartiles(ratios)
    figures["tokens_per_s_over_vllm_quarter"] = low
    figures["tokens_per_s_over_vllm_three_quarters"] = high
    first = samples["penstock_ttft_ms_c1"], samples["vllm_ttft_ms_c1"]
    figures["ttft_ms_more_than_vllm"] = statistics.median(
        ours - theirs for ours, theirs in zip(*first, strict=True)
    )
    return figures


def _quartiles(values: list[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high
