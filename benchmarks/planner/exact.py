"""The same requests on the same static workers in the exact simulator: how far the benchmark's engines are from it."""

from collections.abc import Mapping

import numpy as np

from benchmarks.planner.baselines import Static
from benchmarks.planner.experiment import play
from benchmarks.planner.workload import Workload
from benchmarks.planner.world.fleets import Model
from penstock.core.types.instances import Role
from penstock.sim.report import latencies_s
from penstock.sim.simulate import simulate
from penstock.sim.trace import TraceRow
from penstock.sim.workload import trace_sessions


def against_exact(load: Workload, model: Model, replicas: Mapping[Role, int]) -> dict[str, float]:
    """Give TTFT, ITL, cached share and SLO attainment of both; the exact one has routers, transports and blocks.

    Raises:
        ConfigError: a request does not fit a worker.
    """
    deployment = model.deployment(replicas)
    rows = [
        TraceRow(at_s, tokens, output, load.prefix_ids(number))
        for number, (at_s, tokens, output) in enumerate(
            zip(load.at_s.tolist(), load.input_tokens.tolist(), load.output_tokens.tolist(), strict=True)
        )
    ]
    sessions = list(trace_sessions(rows, seed=1))
    deployment.check(sessions)
    recording = simulate(deployment, sessions, seed=1)
    ttft_s, itl_s, _ = latencies_s(recording)
    cached_share = float(np.asarray(recording.cached_tokens).sum() / load.input_tokens.sum())
    exact = _figures(np.asarray(ttft_s), np.asarray(itl_s), model) | {"cached_share": cached_share}
    own = play(Static(), load, model.fleet, model.slo, replicas=replicas, start_s=60.0)
    ours = {name: getattr(own, name) for name in exact}
    return {f"exact_{name}": value for name, value in exact.items()} | {
        f"fast_{name}": value for name, value in ours.items()
    }


def _figures(ttft_s: np.ndarray, itl_s: np.ndarray, model: Model) -> dict[str, float]:
    held = (ttft_s <= model.slo.ttft_s) & (itl_s <= model.slo.itl_s)
    return {
        "attainment": float(held.mean()),
        "ttft_p50_s": float(np.percentile(ttft_s, 50)),
        "ttft_p99_s": float(np.percentile(ttft_s, 99)),
        "itl_p50_s": float(np.percentile(itl_s, 50)),
        "itl_p99_s": float(np.percentile(itl_s, 99)),
    }
