"""The same requests on the same static workers in the exact simulator: how far the benchmark's engines are from it."""

import numpy as np

from benchmarks.planner.baselines import Static
from benchmarks.planner.experiment import play
from benchmarks.planner.workload import Workload
from benchmarks.planner.world.fleets import Model
from penstock.core.types.instances import Role
from penstock.sim.report.report import latencies_s
from penstock.sim.simulate import simulate
from penstock.sim.workload.prompt import Prompt, named_units
from penstock.sim.workload.workload import Session, Turn

_UNIT_TOKENS = 16


def against_exact(load: Workload, model: Model, workers: int) -> dict[str, float]:
    """Give TTFT, ITL and SLO attainment of both; the exact one has routers, transports and blocks.

    Raises:
        ConfigError: a request does not fit a worker.
    """
    deployment = model.deployment(workers)
    nothing = named_units(0, 0)
    rows = zip(load.at_s.tolist(), load.input_tokens.tolist(), load.output_tokens.tolist(), strict=True)
    sessions = [
        Session(at_s, (Turn(tokens, output),), Prompt(number + 1, nothing, _UNIT_TOKENS))
        for number, (at_s, tokens, output) in enumerate(rows)
    ]
    deployment.check(sessions)
    ttft_s, itl_s, _ = latencies_s(simulate(deployment, sessions, seed=1))
    exact = _figures(np.asarray(ttft_s), np.asarray(itl_s), model)
    own = play(Static(), load, model.fleet, model.slo, replicas={Role.AGGREGATED: workers}, start_s=60.0)
    ours = {"attainment": own.attainment, "ttft_p99_s": own.ttft_p99_s, "itl_p99_s": own.itl_p99_s}
    return {f"exact_{name}": value for name, value in exact.items()} | {
        f"fast_{name}": value for name, value in ours.items()
    }


def _figures(ttft_s: np.ndarray, itl_s: np.ndarray, model: Model) -> dict[str, float]:
    held = (ttft_s <= model.slo.ttft_s) & (itl_s <= model.slo.itl_s)
    return {
        "attainment": float(held.mean()),
        "ttft_p99_s": float(np.percentile(ttft_s, 99)),
        "itl_p99_s": float(np.percentile(itl_s, 99)),
    }
