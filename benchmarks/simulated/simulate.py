"""Requests that the simulator runs per second of wall time, and the files that take the time."""

import argparse
import cProfile
import pstats
import random
import resource
from collections import Counter
from pathlib import Path
from time import perf_counter, process_time

import penstock
from penstock.bench.report import BenchReport
from penstock.core import log
from penstock.core.errors import ConfigError
from penstock.graph import Overrides, build, load
from penstock.sim.deployment import SimDeployment, plan_deployment
from penstock.sim.simulate import simulate
from penstock.sim.trace import read_trace
from penstock.sim.workload import SimSession, WorkloadConfig, make_sessions, trace_sessions

_BLOCK_SIZES = (16, 64, 512)
_GROWING = (5000, 10_000, 20_000)
_OUTPUTS = (64, 512, 4096)
_SCALES = {"simulate_scale_s": 1000, "simulate_scale_s_w8": 8}
_BUSY_PER_S = 3.0
"""Requests to each worker: well below its capacity with answers of 256 tokens."""
_CALM_PER_S = 0.2
"""So few that answers of 4,096 tokens do not queue: about six run in each worker."""
_SEED = 0
_QUICK_TRACE = Path("tests/data/mooncake_trace.jsonl")
_QUICK = {"trace": 300, "growing": 20, "output": 100, "scale": 500, "workers": 20}
_TURNS = 3
"""Each time is the median of so many runs, because other work may share the machine."""
_PROFILED = 1000
_PROFILE_LINES = 12
_PACKAGE = Path(penstock.__file__).parent


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help=f"Azure CSV or Mooncake JSONL, plain or gzipped (with --quick default {_QUICK_TRACE})",
    )
    parser.add_argument(
        "--graph",
        metavar="FILE",
        default="examples/graphs/8b-h100-x8.yaml",
        help="the workers (default: %(default)s)",
    )
    parser.add_argument(
        "--scale-requests",
        type=int,
        default=100_000,
        metavar="N",
        help="synthetic requests on 8 and on 1000 workers (default %(default)s; 0 leaves them out)",
    )


def run(options: argparse.Namespace) -> BenchReport:
    """Run the trace at three block sizes, then synthetic requests: more and more requests, longer answers, many workers.

    Raises:
        ConfigError: a file cannot be read, or --trace is missing.
    """
    trace: Path | None = options.trace or (_QUICK_TRACE if options.quick else None)
    if trace is None:
        raise ConfigError("--trace: name a trace's file; only --quick has a default")
    if options.scale_requests < 0:
        raise ConfigError(f"--scale-requests: must be >= 0, got {options.scale_requests}")
    log.configure("error", process="bench")
    rows = read_trace(trace)[: _QUICK["trace"] if options.quick else None]
    sessions = list(trace_sessions(rows, seed=_SEED))
    figures: dict[str, float] = {}
    for block_size in _BLOCK_SIZES:
        wall_s, cpu_s = _time_runs(options.graph, sessions, f"block_size={block_size}")
        figures[f"simulate_requests_per_wall_s_b{block_size}"] = len(sessions) / wall_s
        figures[f"simulate_requests_per_cpu_s_b{block_size}"] = len(sessions) / cpu_s
    figures["simulate_peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    for requests in _GROWING:
        synthetic = _synthetic(requests // _QUICK["growing"] if options.quick else requests)
        _, cpu_s = _time_runs(options.graph, synthetic)
        figures[f"simulate_cpu_s_per_request_n{requests}"] = cpu_s / len(synthetic)
    for output_tokens in _OUTPUTS:
        synthetic = _synthetic(
            _QUICK["output"] if options.quick else 2000, output_tokens=output_tokens, per_worker_s=_CALM_PER_S
        )
        _, cpu_s = _time_runs(options.graph, synthetic)
        figures[f"simulate_cpu_s_per_request_o{output_tokens}"] = cpu_s / len(synthetic)
    synthetic = _synthetic(_QUICK["output"] if options.quick else 5000)
    wall_s, cpu_s = _clock(_disaggregated(_plan(options.graph)), synthetic, turns=_TURNS)
    figures["simulate_requests_per_wall_s_disaggregated"] = len(synthetic) / wall_s
    figures["simulate_requests_per_cpu_s_disaggregated"] = len(synthetic) / cpu_s
    if options.scale_requests:
        for name, workers in _SCALES.items():
            workers_run = min(workers, _QUICK["workers"]) if options.quick else workers
            requests = _QUICK["scale"] if options.quick else options.scale_requests
            synthetic = _synthetic(requests, workers=workers_run)
            wall_s, cpu_s = _time_runs(
                options.graph, synthetic, f"roles.aggregated.replicas={workers_run}", turns=1
            )
            figures[name] = wall_s
            figures[name.replace("scale_s", "scale_cpu_s")] = cpu_s
    return BenchReport(
        name="simulate",
        config={
            "trace": trace.name,
            "graph": Path(options.graph).name,
            "requests": len(sessions),
            "scale_requests": options.scale_requests,
            "turns": _TURNS,
            "quick": options.quick,
        },
        figures=figures,
        samples=_profile(options.graph, sessions[:_PROFILED]),
    )


def _time_runs(
    graph: str, sessions: list[SimSession], *changes: str, turns: int = _TURNS
) -> tuple[float, float]:
    """Give wall and CPU seconds of the median run."""
    return _clock(_plan(graph, *changes), sessions, turns=turns)


def _clock(deployment: SimDeployment, sessions: list[SimSession], *, turns: int) -> tuple[float, float]:
    runs = []
    for _ in range(turns):
        wall_s, cpu_s = perf_counter(), process_time()
        simulate(deployment, sessions, seed=_SEED)
        runs.append((perf_counter() - wall_s, process_time() - cpu_s))
    return sorted(runs)[turns // 2]


def _plan(graph: str, *changes: str) -> SimDeployment:
    return plan_deployment(load(graph, Overrides(list(changes))), beside=Path(graph).parent)


def _disaggregated(deployment: SimDeployment) -> SimDeployment:
    """Make half of the workers prefill workers and the others decode workers; every prompt is disaggregated."""
    graph = deployment.graph
    whole = graph.roles.aggregated
    assert whole is not None, "the bench's graph has aggregated workers"
    half = whole.model_copy(update={"replicas": whole.replicas // 2})
    settings = ["router.policy=least-loaded"]
    data = graph.model_dump(mode="json", exclude_unset=True)
    data["roles"] = dict.fromkeys(("prefill", "decode"), half.model_dump(mode="json", exclude_unset=True))
    return plan_deployment(build(data, Overrides(settings)), beside=Path())


def _synthetic(
    requests: int, *, workers: int = 8, output_tokens: int = 256, per_worker_s: float = _BUSY_PER_S
) -> list[SimSession]:
    """Make requests whose prompts share their first half; token counts do not change arrival times."""
    config = WorkloadConfig(
        requests=requests,
        rate_per_s=per_worker_s * workers,
        input_tokens=512,
        output_tokens=output_tokens,
        shared_prefix_tokens=512,
        prefix_groups=64,
    )
    return list(make_sessions(config, random.Random(_SEED)))


def _profile(graph: str, sessions: list[SimSession]) -> dict[str, list[float]]:
    """Give the share of CPU time by file, the largest first."""
    deployment = _plan(graph)
    profiler = cProfile.Profile()
    profiler.enable()
    simulate(deployment, sessions, seed=_SEED)
    profiler.disable()
    seconds: Counter[str] = Counter()
    for (file, _, _), (_, _, own_s, _, _) in pstats.Stats(profiler).stats.items():  # type: ignore[attr-defined]
        path = Path(file)
        name = str(path.relative_to(_PACKAGE)) if path.is_relative_to(_PACKAGE) else path.name
        seconds[name] += own_s
    total_s = seconds.total()
    return {f"profile_share {name}": [own_s / total_s] for name, own_s in seconds.most_common(_PROFILE_LINES)}
