"""Agents that call tools beside other traffic, on 8 H100: what sessions and a host tier bring, each alone and both together.

An agent asks, waits for a tool, and asks again with all that was said. Chats that come once pass by and evict its prefix.
Engines run every step with the real scheduler, since sessions are its matter.
"""

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from benchmarks.runner import add_simulations, expect_at_least, find_graph
from penstock.bench.report import BenchReport
from penstock.core import log
from penstock.sim.report import latencies_s
from penstock.sim.simulate import simulate
from penstock.sim.workload import SimPrompt, SimSession, Turn, named, named_units

_DEVICES_8 = ("roles.aggregated.replicas=4",)
_HOST = ("roles.aggregated.kv.host=4x",)
CASES = {
    "plain": (False, _DEVICES_8),
    "sessions": (True, _DEVICES_8),
    "host": (False, (*_DEVICES_8, *_HOST)),
    "both": (True, (*_DEVICES_8, *_HOST)),
}
"""Whether agents open sessions, and settings of the graph."""
RATES = (0.1, 0.15, 0.175)
"""Agents that start per second, over 8 GPUs; six times as many chats come beside them."""
TARGET_S = 1.0
"""Limit of the 90th percentile of agents' TTFT."""
DEPLOYMENT = "70b-fp8"
_CHATS_PER_AGENT = 6
_TURNS = 8
_SYSTEM_TOKENS = 2048
_FIRST_TOKENS, _TOOL_TOKENS, _ANSWER_TOKENS = 10_000, 2000, 150
_CHAT_TOKENS, _CHAT_ANSWER_TOKENS = 12_000, 200
_PAUSE_S = (2.0, 60.0)
_UNIT_TOKENS = 16
_DEVICES = 8


@dataclass(frozen=True, slots=True)
class _Cell:
    """One simulation."""

    case: str
    rate_per_s: float
    seed: int
    agents: int
    examples: Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--agents",
        type=int,
        default=80,
        metavar="N",
        help="of a run, with 8 turns each (default %(default)s)",
    )
    parser.add_argument(
        "--seeds", type=int, default=2, metavar="N", help="runs of each kind (default %(default)s)"
    )
    add_simulations(parser)


def run(options: argparse.Namespace) -> BenchReport:
    """Simulate every case at every rate.

    Raises:
        ConfigError: an option or file is wrong.
    """
    expect_at_least(options, agents=1, seeds=1, jobs=1)
    agents, seeds, rates = (8, 1, RATES[-1:]) if options.quick else (options.agents, options.seeds, RATES)
    cells = [
        _Cell(case, rate_per_s, seed, agents, options.examples)
        for rate_per_s, seed, case in product(rates, range(1, seeds + 1), CASES)
    ]
    found: dict[tuple[str, float], list[dict[str, float]]] = {}
    with get_context("spawn").Pool(min(options.jobs, len(cells))) as pool:
        for cell, figures in zip(cells, pool.imap(_simulate, cells), strict=True):
            print(
                f"{cell.case} at {cell.rate_per_s:g}/s, seed {cell.seed}: TTFT {figures['ttft_mean_s']:.3f} s,"
                f" cached {figures['hit_share']:.0%}",
                file=sys.stderr,
                flush=True,
            )
            found.setdefault((cell.case, cell.rate_per_s), []).append(figures)
    return _report(found, agents=agents, seeds=seeds, rates=rates, quick=options.quick)


def sessions_of(*, agents: int, rate_per_s: float, opens: bool, seed: int) -> list[SimSession]:
    """Make the agents and the chats beside them, sorted by time; the same for one seed, whether or not sessions are opened."""
    rng = random.Random(seed)
    made = list(_agents(agents, rate_per_s, rng, opens=opens))
    end_s = made[-1].at_s + 0.5 * _TURNS * sum(_PAUSE_S) / 2  # while most agents run
    at_s = 0.0
    number = 0
    while (at_s := at_s + rng.expovariate(_CHATS_PER_AGENT * rate_per_s)) < end_s:
        number += 1
        turn = Turn(_length(_CHAT_TOKENS, rng), _length(_CHAT_ANSWER_TOKENS, rng))
        made.append(SimSession(at_s, (turn,), SimPrompt(named(seed, 2, number)), tenant="chats"))
    return sorted(made, key=lambda session: session.at_s)


def _agents(agents: int, rate_per_s: float, rng: random.Random, *, opens: bool) -> Iterator[SimSession]:
    system = named_units(named(7), _SYSTEM_TOKENS // _UNIT_TOKENS)
    at_s = 0.0
    for number in range(agents):
        at_s += rng.expovariate(rate_per_s)
        turns = []
        so_far = _SYSTEM_TOKENS + _length(_FIRST_TOKENS, rng)
        for index in range(_TURNS):
            answer = _length(_ANSWER_TOKENS, rng)
            turns.append(Turn(so_far, answer, rng.uniform(*_PAUSE_S) if index else 0.0))
            so_far += answer + _length(_TOOL_TOKENS, rng)
        prompt = SimPrompt(named(rng.getrandbits(32), 1, number), system, _UNIT_TOKENS)
        yield SimSession(at_s, tuple(turns), prompt, tenant="agents", opens=opens)


def _length(mean: int, rng: random.Random) -> int:
    return max(round(mean * rng.lognormvariate(-0.125, 0.5)), 1)


def _simulate(cell: _Cell) -> dict[str, float]:
    log.configure("warning", process="kv-agents")
    opens, settings = CASES[cell.case]
    deployment = replace(find_graph(cell.examples, DEPLOYMENT, settings).deployment(), exact=True)
    made = sessions_of(agents=cell.agents, rate_per_s=cell.rate_per_s, opens=opens, seed=cell.seed)
    deployment.check(made)
    recording = simulate(deployment, made, seed=cell.seed)
    ttft_s, _, _ = latencies_s(recording)
    of_agents = np.asarray(recording.tenants) == "agents"
    prompts, cached = np.asarray(recording.prompt_tokens), np.asarray(recording.cached_tokens)
    own = ttft_s[of_agents]
    return {
        "failed": float(recording.failed),
        "ttft_mean_s": float(own.mean()),
        "ttft_p50_s": float(np.percentile(own, 50)),
        "ttft_p90_s": float(np.percentile(own, 90)),
        "ttft_p99_s": float(np.percentile(own, 99)),
        "chats_ttft_mean_s": float(ttft_s[~of_agents].mean()),
        "hit_share": float(cached[of_agents].sum() / prompts[of_agents].sum()),
    }


def largest_rate(rates: Sequence[float], ttft_p90_s: Sequence[float]) -> float:
    """Give the rate up to which the TTFT keeps `TARGET_S`, on straight lines between the measured rates.

    Args:
        rates: rising.
        ttft_p90_s: at each of them.

    Returns:
        0 if the first rate is too high, the last one if none is.
    """
    kept = 0
    while kept < len(rates) and ttft_p90_s[kept] <= TARGET_S:
        kept += 1
    if kept in {0, len(rates)}:
        return rates[-1] if kept else 0.0
    below, above = ttft_p90_s[kept - 1], ttft_p90_s[kept]
    share = (TARGET_S - below) / (above - below)
    return rates[kept - 1] + share * (rates[kept] - rates[kept - 1])


def _report(
    found: dict[tuple[str, float], list[dict[str, float]]],
    *,
    agents: int,
    seeds: int,
    rates: tuple[float, ...],
    quick: bool,
) -> BenchReport:
    figures: dict[str, float] = {}
    samples = {
        f"{case} {rate:g}/s {metric}": [each[metric] for each in runs]
        for (case, rate), runs in found.items()
        for metric in runs[0]
    }
    for name, values in samples.items():
        figures[name] = float(np.mean(values))
    for case in CASES:
        rate = largest_rate(rates, [figures[f"{case} {each:g}/s ttft_p90_s"] for each in rates])
        figures[f"{case} largest_rate_per_s"] = rate
        if rate:
            figures[f"{case} gpu_hours_per_1000_agents"] = _DEVICES * 1000 / rate / 3600
    return BenchReport(
        name="kv-agents",
        config={
            "deployment": DEPLOYMENT,
            "agents": agents,
            "turns": _TURNS,
            "pause_s": _PAUSE_S,
            "chats_per_agent": _CHATS_PER_AGENT,
            "rates_per_s": rates,
            "target_p90_s": TARGET_S,
            "seeds": seeds,
            "quick": quick,
        },
        figures=figures,
        samples=samples,
    )
