"""A deployment over etcd and NATS on hosts of network namespaces: requests under faults, and its CPU time beside local planes.

Every answer is compared with the one that its prompt got before. A request that was under way at a frontend that was killed is
excused and asked again; every other one must end, with the same text.
"""

import argparse
import asyncio
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from benchmarks.chaos.faults import Faults
from benchmarks.chaos.hosts import Hosts, Supervisor
from benchmarks.chaos.load import Frontend, Load, Outcome
from benchmarks.chaos.parts import add_up
from benchmarks.frontend.servers import cpu_s
from penstock.bench.report import BenchReport

_HOSTS, _FRONTENDS, _WORKERS = 4, 2, 2
_REQUESTS, _QUICK_REQUESTS = 100_000, 1_000
_CPU_REQUESTS, _QUICK_CPU_REQUESTS = 500, 100
_CPU_ROUNDS, _QUICK_CPU_ROUNDS = 9, 3
_PROMPTS = 32
_OUTPUT_TOKENS = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--requests", type=int, metavar="N", help=f"under faults (default {_REQUESTS}; 0: none)"
    )
    parser.add_argument(
        "--cpu-requests",
        type=int,
        metavar="N",
        help=f"of each of {_CPU_ROUNDS} rounds without faults beside local planes (default {_CPU_REQUESTS}; 0: none)",
    )
    parser.add_argument("--concurrency", type=int, default=32, metavar="C", help="at once (default 32)")
    parser.add_argument(
        "--fault-every-s", type=float, default=10.0, metavar="S", help="from fault to fault (default 10)"
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of faults and prompts (default 1)")
    parser.add_argument(
        "--add",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="count the requests of these reports, of other seeds, instead of putting requests under faults",
    )


def run(options: argparse.Namespace) -> BenchReport:
    return asyncio.run(_run(options))


async def _run(options: argparse.Namespace) -> BenchReport:
    requests, cpu_requests = options.requests, options.cpu_requests
    if requests is None:
        requests = _QUICK_REQUESTS if options.quick else _REQUESTS
    if cpu_requests is None:
        cpu_requests = _QUICK_CPU_REQUESTS if options.quick else _CPU_REQUESTS
    rounds = _QUICK_CPU_ROUNDS if options.quick else _CPU_ROUNDS
    if options.add:
        requests = 0
    figures: dict[str, float] = {}
    samples: dict[str, list[float]] = {}
    counts: Counter[str] = Counter()
    problems: list[str] = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        if cpu_requests:
            figures, samples = await _measure_cpu(session, options, cpu_requests, rounds)
        if requests:
            under_faults, counts, problems = await _put_under_faults(session, options, requests)
            figures = under_faults | figures
    if options.add:
        return add_up(options.add, figures, samples)
    return BenchReport(
        name="chaos",
        config={
            "hosts": _HOSTS, "frontends": _FRONTENDS, "workers": _HOSTS * _WORKERS, "requests": requests,
            "concurrency": options.concurrency, "output_tokens": _OUTPUT_TOKENS, "seed": options.seed,
            "fault_every_s": options.fault_every_s, "faults": dict(counts),
        },
        figures=figures,
        samples=samples,
        problems=problems,
    )  # fmt: skip


async def _measure_cpu(
    session: aiohttp.ClientSession, options: argparse.Namespace, requests: int, rounds: int
) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Put requests without faults on both deployments in turn; return figures and samples of CPU time."""
    async with _local() as (supervisor, frontend), _spread() as (_, supervisors, frontends, registries):
        sides = {
            "local": (_load([frontend] * _FRONTENDS, options.seed), [supervisor]),
            "planes": (_load(frontends, options.seed), supervisors),
        }
        for load, _ in sides.values():
            await load.learn(session)
        used_s: dict[str, list[float]] = {side: [] for side in (*sides, "registries")}
        for _ in range(rounds):  # in turn, since the machine's speed changes
            for side, (load, of) in sides.items():
                before_s = _servers_s(registries)
                used_s[side].append(
                    await _cpu_s_per_request(load, session, of, requests, options.concurrency)
                )
                if side == "planes":
                    used_s["registries"].append((_servers_s(registries) - before_s) / requests)
    ratios = [planes / local for planes, local in zip(used_s["planes"], used_s["local"], strict=True)]
    figures = {f"{side}_cpu_ms_per_request": 1e3 * median(seconds) for side, seconds in used_s.items()}
    samples = {f"{side}_cpu_s": seconds for side, seconds in used_s.items()}
    return figures | {"planes_cpu_over_local": median(ratios)}, samples


async def _put_under_faults(
    session: aiohttp.ClientSession, options: argparse.Namespace, requests: int
) -> tuple[dict[str, float], Counter[str], list[str]]:
    """Put requests while faults happen; return figures, the number of faults by kind, and problems."""
    async with _spread() as (hosts, supervisors, frontends, registries):
        load = _load(frontends, options.seed)
        await load.learn(session)
        faults = Faults(hosts, supervisors, frontends, registries, seed=options.seed)
        began_s = asyncio.get_running_loop().time()
        doing = asyncio.create_task(faults.keep_doing(options.fault_every_s))
        outcome = await load.put(session, requests, options.concurrency)
        lasted_s = asyncio.get_running_loop().time() - began_s
        doing.cancel()
        await asyncio.wait((doing,))
        if not doing.cancelled() and (error := doing.exception()) is not None:
            raise error
    return _chaos_figures(outcome, faults, lasted_s), faults.counts, outcome.problems


def _chaos_figures(outcome: Outcome, faults: Faults, lasted_s: float) -> dict[str, float]:
    latencies_s = sorted(outcome.latencies_s) or [0.0]
    kinds = ("completed", "excused", "lost", "wrong", "repeated")
    return {f"chaos_{kind}": outcome.counts[kind] for kind in kinds} | {
        "chaos_faults": sum(faults.counts.values()),
        "chaos_s": lasted_s,
        "chaos_requests_per_s": outcome.counts["completed"] / lasted_s,
        "chaos_latency_p50_s": latencies_s[len(latencies_s) // 2],
        "chaos_latency_max_s": latencies_s[-1],
    }


def _load(frontends: list[Frontend], seed: int) -> Load:
    return Load(frontends, output_tokens=_OUTPUT_TOKENS, prompts=_PROMPTS, seed=seed)


def _servers_s(registries: dict[str, Any]) -> float:
    return sum(cpu_s(server.pid) for server in registries.values())


async def _cpu_s_per_request(
    load: Load, session: aiohttp.ClientSession, supervisors: list[Supervisor], requests: int, concurrency: int
) -> float:
    before_s = sum(supervisor.cpu_s() for supervisor in supervisors)
    await load.put(session, requests, concurrency)
    return (sum(supervisor.cpu_s() for supervisor in supervisors) - before_s) / requests


def _graph(**settings: Any) -> dict[str, Any]:
    """A deployment of mock workers that finish 32 tokens in a few hundred milliseconds."""
    return {
        "model": "demo",
        "name": "chaos",
        "supervision": {"spare_processes": 0, "restart_delay_max_s": 0.5},
        "request_plane": {"heartbeat_interval_s": 0.5, "heartbeat_timeout_s": 2.0},
        **settings,
    }


def _role(replicas: int) -> dict[str, Any]:
    return {"aggregated": {"engine": "mock", "replicas": replicas}}


@asynccontextmanager
async def _local() -> AsyncIterator[tuple[Supervisor, Frontend]]:
    """Run the same processes under one supervisor, with Unix sockets and its hub."""
    graph = _graph(
        roles=_role(_HOSTS * _WORKERS), frontend={"host": "127.0.0.1", "port": 18231, "processes": _FRONTENDS}
    )
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        supervisor = Supervisor(graph, Path(folder) / "local")
        try:
            await asyncio.to_thread(supervisor.wait_ready)
            yield supervisor, Frontend("http://127.0.0.1:18231")
        finally:
            await asyncio.to_thread(supervisor.close)


@asynccontextmanager
async def _spread() -> AsyncIterator[tuple[Hosts, list[Supervisor], list[Frontend], dict[str, Any]]]:
    """Run hosts, and etcd and NATS beside them."""
    from tests.support.registries import Etcd, Nats  # noqa: PLC0415 - Debian's programs

    with Hosts(_HOSTS) as hosts:
        etcd, nats = Etcd(host=hosts.address), Nats(host=hosts.address)
        async with etcd, nats:
            runtime = {
                "discovery": "etcd",
                "urls": [etcd.url],
                "events": "nats",
                "event_urls": [nats.url],
            }
            graph = _graph(
                roles=_role(_WORKERS),
                runtime=runtime,
                frontend={"host": "0.0.0.0", "port": 8000},
            )
            supervisors = [
                hosts.up(host, graph, "aggregated,frontend" if host < _FRONTENDS else "aggregated")
                for host in range(_HOSTS)
            ]
            for supervisor in supervisors:
                await asyncio.to_thread(supervisor.wait_ready)
            frontends = [Frontend(f"http://{hosts.address_of(host)}:8000") for host in range(_FRONTENDS)]
            yield hosts, supervisors, frontends, {"etcd": etcd, "nats": nats}
            for supervisor in supervisors:
                await asyncio.to_thread(supervisor.close)
