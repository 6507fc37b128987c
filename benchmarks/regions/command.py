"""Three regions through a day with a region lost, and one way to help each other after the other on the same requests."""

import argparse
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median

import numpy as np

from benchmarks.regions.traffic import Traffic, questions
from benchmarks.regions.world import HEALTH, ROUND_TRIP_S, TURNED_S, Federation, Loss, Outcome, World
from benchmarks.runner import Cache, Figures, Runner, default_jobs, expect_at_least
from penstock.bench.report import Report
from penstock.core import log
from penstock.core.types.requests import Request
from penstock.graph import Overrides, load
from penstock.router.dispatch.dispatcher import Dispatcher
from penstock.sim.deployment import plan_deployment
from penstock.sim.loop.loop import run as run_simulated
from penstock.sim.simulate import _rare_collections

GRAPH = Path("examples/graphs/70b-h100-tp4-x4.yaml")
REGIONS = 3
FEDERATIONS = {
    "alone": Federation(links=False),
    "summary_64k": Federation(bytes_per_s=64_000),
    "load": Federation(),
    "summary_1k": Federation(bytes_per_s=1000),
    "in_turn": Federation(links=False, in_turn=True),
    "summary_1m": Federation(bytes_per_s=1_000_000),
    "summary_8k": Federation(bytes_per_s=8000),
}
_SEED = 1
_DECISIONS, _BATCH = 400, 50


@dataclass(frozen=True, slots=True)
class Size:
    """A run: `workers` in each region, `per_worker_s` requests to each a second, and a lost region for a part of the day."""

    workers: int
    per_worker_s: float
    day_s: float
    documents: int
    lost_from: float = 0.4
    lost_until: float = 0.7

    @property
    def traffic(self) -> Traffic:
        return Traffic(
            REGIONS,
            self.day_s,
            self.per_worker_s * self.workers,
            documents=self.documents,
            document_tokens=24_576,
        )

    @property
    def loss(self) -> Loss:
        return Loss(REGIONS - 1, self.lost_from * self.day_s, self.lost_until * self.day_s)


_WHOLE = Size(workers=1000, per_worker_s=0.17, day_s=64.0, documents=5000)
_QUICK = Size(workers=20, per_worker_s=0.17, day_s=64.0, documents=100)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, metavar="N", help="of each region (default 1000)")
    parser.add_argument(
        "--jobs", type=int, default=default_jobs(), metavar="N", help="runs at once (default: one a core)"
    )
    parser.add_argument(
        "--state", type=Path, metavar="FILE", help="keep finished runs here, and go on from it"
    )


def run(options: argparse.Namespace) -> Report:
    """Simulate each way to help each other.

    Raises:
        ConfigError: an option is wrong.
    """
    size = _QUICK if options.quick else _WHOLE
    if options.workers is not None:
        expect_at_least(options, workers=2)
        documents = max(size.documents * options.workers // size.workers, 1)
        size = Size(options.workers, size.per_worker_s, size.day_s, documents)
    expect_at_least(options, jobs=1)
    figures: dict[str, float] = {}
    with Runner(options.jobs, Cache(options.state)) as runner:
        for day, found in runner.run_many([Day(name, size) for name in FEDERATIONS]):
            figures |= {f"{day.name}_{key}": value for key, value in found.items()}
    return Report(
        name="regions",
        config={
            **asdict(size),
            **asdict(size.traffic),
            "round_trip_s": ROUND_TRIP_S,
            "health": HEALTH.model_dump(),
            "clients_turned_s": TURNED_S,
            "graph": str(GRAPH),
            "quick": options.quick,
        },
        figures={key: figures[key] for key in sorted(figures)},
    )


@dataclass(frozen=True, slots=True)
class Day:
    """A job: one federation through the day."""

    name: str
    size: Size

    @property
    def key(self) -> str:
        return f"regions {self.name} {asdict(self.size)}"

    def __call__(self) -> Figures:
        return measure(self.name, self.size)


def measure(name: str, size: Size) -> dict[str, float]:
    """Run one federation, and give its figures."""
    log.configure("error", process="bench")
    settings = [
        f"roles.aggregated.replicas={size.workers}",
        "roles.aggregated.hardware=a100",
        f"router.workers_max={max(1024, size.workers + REGIONS)}",
        "router.indexed_blocks_max=200000000",
    ]
    deployment = plan_deployment(load(str(GRAPH), Overrides(settings)), beside=GRAPH.parent)
    worlds: list[_Measured] = []

    async def main(rng: random.Random) -> Outcome:
        worlds.append(_Measured(deployment, size.traffic, FEDERATIONS[name], rng, loss=size.loss))
        return await worlds[0].run()

    begun_s = time.perf_counter()
    with _rare_collections():
        outcome = run_simulated(main, _SEED)
    world = worlds[0]
    return {
        **_figures(outcome, size),
        **world.found,
        "crossed_share": world.crossed / max(len(outcome.ttft_s), 1),
        "wall_s": time.perf_counter() - begun_s,
    }


def _figures(outcome: Outcome, size: Size) -> dict[str, float]:
    ttft_s, sent_s = np.array(outcome.ttft_s), np.array(outcome.sent_s)
    regions, loss = np.array(outcome.regions), size.loss
    during = (sent_s >= loss.from_s) & (sent_s < loss.until_s)
    there = regions != loss.region
    return {
        "requests": len(ttft_s),
        "ttft_mean_s": float(ttft_s.mean()),
        "ttft_p50_s": float(np.percentile(ttft_s, 50)),
        "ttft_p99_s": float(np.percentile(ttft_s, 99)),
        "undisturbed_ttft_mean_s": float(ttft_s[sent_s < loss.from_s].mean()),
        "undisturbed_ttft_p99_s": float(np.percentile(ttft_s[sent_s < loss.from_s], 99)),
        "others_during_loss_ttft_p99_s": float(np.percentile(ttft_s[during & there], 99)),
        "turned_ttft_mean_s": float(ttft_s[during & ~there].mean()) if (during & ~there).any() else 0.0,
        "hit_ratio": sum(outcome.cached_tokens) / (len(ttft_s) * size.traffic.prompt_tokens),
        "lost": sum(outcome.lost.values()),
        "lost_at_the_lost_region": outcome.at_lost,
        "elsewhere_share": outcome.elsewhere / len(ttft_s),
    }


class _Measured(World):
    """A world whose routers and links are measured before they end."""

    found: dict[str, float]
    crossed = 0

    def at_end(self) -> None:
        super().at_end()
        crossings = [server.crossings for region in self.regions for server in region.all_servers]
        self.crossed = sum(each.requests for each in crossings)
        self.found = {}
        if not self.federation.links:
            return
        dispatcher = self.regions[0].dispatcher
        requests = [
            self._request(-1 - number, question.prompt)
            for number, question in zip(
                range(_DECISIONS), questions(self._traffic, random.Random(2)), strict=False
            )
        ]
        index = dispatcher._shared.fleet._indexer.regions
        stats = index._tree.stats()
        self.found = {
            "summary_bytes_per_s": mean(each.summary_bytes for each in crossings) / self._traffic.day_s,
            "summary_bytes_per_s_max": max(each.peak_bytes_per_s for each in crossings),
            "summary_cpu_ms": 1e3 * sum(each.summary_cpu_s for each in crossings)
            / max(sum(each.summaries for each in crossings), 1),
            "told_chunks": float(stats.pairs),
            "region_index_bytes": float(stats.num_bytes),
            "decision_us": _decision_us(dispatcher, requests, links=True),
            "decision_without_links_us": _decision_us(dispatcher, requests, links=False),
        }  # fmt: skip


def _decision_us(dispatcher: Dispatcher, requests: list[Request], *, links: bool) -> float:
    """Give the median batch's microseconds of pricing a request on all workers."""
    router = dispatcher._shared.router
    pool = dispatcher._shared.fleet.pools[requests[0].model]
    kept = set(pool._deployments)
    if not links:
        pool._deployments.clear()
    batches_us = []
    for first in range(0, len(requests), _BATCH):
        begun_s = time.process_time()
        for request in requests[first : first + _BATCH]:
            router.score(request)
        batches_us.append(1e6 * (time.process_time() - begun_s) / _BATCH)
    pool._deployments |= kept
    return median(batches_us)
