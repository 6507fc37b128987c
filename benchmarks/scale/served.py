"""One frontend against four over the same eight mock workers, real processes: TTFT and prefix hits of the same load.

Requests of prefix groups arrive at random, each on a connection of its own, so that the kernel deals them out among
the frontends of a port. Both sides are up all the time and are loaded in turn, at the same times with prompts of their own.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np

from benchmarks.chaos.hosts import Supervisor
from penstock.bench.client import Address, Client
from penstock.bench.exchange import Exchange
from penstock.bench.load import Planned, run_load
from penstock.bench.prompts import text
from penstock.bench.report import Report
from tests.support.registries import free_port

_WORKERS, _FRONTENDS = 8, 4
_KV_BLOCKS = 1536
"""Of 16 tokens: a worker has room for a sixth of the prefixes, and for its running requests."""
_SPEEDUP = 0.2
"""A worker is five times as slow as the modelled GPU, so that two cores carry eight of them and are not what is measured."""
_GROUPS, _PREFIX_WORDS, _OWN_WORDS = 48, 1500, 300
_OUTPUT_TOKENS = 32
_ROUNDS, _QUICK_ROUNDS = 4, 1
_ROUND_S, _QUICK_ROUND_S = 16.0, 4.0
_WARM_S = 4.0
_CONCURRENCY = 4096
_TIMEOUT_S = 60.0
_MODEL = "penstock-demo"


@dataclass(slots=True)
class _Round:
    """What one round's clients saw."""

    ttft_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    lag_s_max: float = 0.0
    failures: list[str] = field(default_factory=list)

    def add(self, exchange: Exchange) -> None:
        self.lag_s_max = max(self.lag_s_max, exchange.sent_s - exchange.due_s)
        if exchange.failure is not None or exchange.usage is None:
            self.failures.append(f"{exchange.failure}: {exchange.message}")
            return
        self.ttft_s.append(exchange.ttft_s)
        self.prompt_tokens += exchange.usage.prompt_tokens
        self.cached_tokens += exchange.cached_tokens or 0

    def figures(self) -> dict[str, float]:
        p50_s, p99_s = np.percentile(self.ttft_s or [0.0], (50, 99))
        hits = self.cached_tokens / max(self.prompt_tokens, 1)
        return {"ttft_p50_s": float(p50_s), "ttft_p99_s": float(p99_s), "hit_share": hits}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rate", type=float, default=56.0, metavar="R", help="requests per second (default %(default)g)"
    )
    parser.add_argument(
        "--rounds", type=int, metavar="N", help=f"of each side (default {_ROUNDS})", default=None
    )


def run(options: argparse.Namespace) -> Report:
    return asyncio.run(_run(options))


async def _run(options: argparse.Namespace) -> Report:
    rounds = options.rounds or (_QUICK_ROUNDS if options.quick else _ROUNDS)
    round_s = _QUICK_ROUND_S if options.quick else _ROUND_S
    found: dict[str, list[_Round]] = {"one": [], "several": []}
    used_s = lasted_s = 0.0
    async with _sides() as (supervisors, urls):
        for side in found:
            await _put(urls[side], options.rate, _WARM_S, side, seed=-1)
        for number in range(rounds):
            for side in found if number % 2 == 0 else reversed(found):
                began_s, before_s = time.perf_counter(), _cpu_s(supervisors)
                result = await _put(urls[side], options.rate, round_s, side, seed=number)
                found[side].append(result)
                used_s += _cpu_s(supervisors) - before_s
                lasted_s += time.perf_counter() - began_s
                _tell(f"{side}, round {number + 1}: {result.figures()}, {len(result.failures)} failed")
    return _report(options, found, cpu_cores=used_s / lasted_s, round_s=round_s)


def _report(
    options: argparse.Namespace, found: dict[str, list[_Round]], *, cpu_cores: float, round_s: float
) -> Report:
    figures: dict[str, float] = {}
    samples: dict[str, list[float]] = {}
    for side, rounds in found.items():
        for name in rounds[0].figures():
            samples[f"{side}_{name}"] = [each.figures()[name] for each in rounds]
            figures[f"{side}_{name}"] = median(samples[f"{side}_{name}"])
        samples[f"{side}_ttft_s"] = [seconds for each in rounds for seconds in each.ttft_s]
    for name in ("ttft_p50", "ttft_p99"):
        pairs = zip(samples[f"several_{name}_s"], samples[f"one_{name}_s"], strict=True)
        figures[f"{name}_ratio"] = median(several / one for several, one in pairs)
    lags_s = [each.lag_s_max for rounds in found.values() for each in rounds]
    failures = [failure for rounds in found.values() for each in rounds for failure in each.failures]
    return Report(
        name="routers-served",
        config={
            "workers": _WORKERS, "frontends": _FRONTENDS, "rate_per_s": options.rate, "round_s": round_s,
            "rounds": len(found["one"]), "groups": _GROUPS, "prefix_words": _PREFIX_WORDS, "own_words": _OWN_WORDS,
            "output_tokens": _OUTPUT_TOKENS, "kv_blocks": _KV_BLOCKS, "speedup": _SPEEDUP,
        },
        figures=figures
        | {
            "servers_cpu_cores": cpu_cores,
            "client_lag_s_max": max(lags_s),
            "requests": sum(len(each.ttft_s) for rounds in found.values() for each in rounds),
            "prompt_tokens_mean": sum(each.prompt_tokens for rounds in found.values() for each in rounds)
            / max(sum(len(each.ttft_s) for rounds in found.values() for each in rounds), 1),
        },
        samples=samples,
        problems=failures[:5],
    )  # fmt: skip


async def _put(url: str, rate: float, seconds: float, side: str, *, seed: int) -> _Round:
    """Send requests of groups that only this round of this side has; wait for all answers."""
    client = Client(Address.parse(url, "chat/completions"), timeout_s=_TIMEOUT_S)
    result = _Round()

    async def send(planned: Planned, due_s: float | None) -> None:
        result.add(await client.send(_body(planned), due_s))
        client.close()  # idle connections: each request has one of its own

    await run_load(_plan(rate, seconds, side, seed), send, concurrency=_CONCURRENCY, duration_s=None)
    return result


def _plan(rate: float, seconds: float, side: str, seed: int) -> Iterator[Planned]:
    """Plan a round: both sides have the same times and groups, in other words."""
    rng = random.Random(seed)
    prefixes = [text(f"{side}/{seed}/group/{group}", _PREFIX_WORDS) for group in range(_GROUPS)]
    at_s, number = rng.expovariate(rate), 0
    while at_s < seconds:
        own = text(f"{side}/{seed}/request/{number}", _OWN_WORDS)
        yield Planned(f"{rng.choice(prefixes)} {own}", _OUTPUT_TOKENS, at_s)
        at_s += rng.expovariate(rate)
        number += 1


def _body(planned: Planned) -> bytes:
    return msgspec.json.encode(
        {
            "model": _MODEL, "messages": [{"role": "user", "content": planned.prompt}], "ignore_eos": True,
            "max_tokens": planned.output_tokens, "stream": True, "stream_options": {"include_usage": True},
        }
    )  # fmt: skip


def _cpu_s(supervisors: list[Supervisor]) -> float:
    return sum(supervisor.cpu_s() for supervisor in supervisors)


@asynccontextmanager
async def _sides() -> AsyncIterator[tuple[list[Supervisor], dict[str, str]]]:
    """Run the workers with one frontend, and four more frontends beside them; give the URL of each side."""
    hub = f"tcp://127.0.0.1:{free_port()}"
    ports = {"one": free_port(), "several": free_port()}
    supervisors: list[Supervisor] = []
    with tempfile.TemporaryDirectory(prefix="routers-") as folder:
        try:
            for side, processes, words in (
                ("one", 1, ()),
                ("several", _FRONTENDS, ("--join", hub, "--run", "frontend")),
            ):
                graph = _graph(hub, ports[side], processes)
                supervisors.append(Supervisor(graph, Path(folder) / side, *words))
                await asyncio.to_thread(supervisors[-1].wait_ready)
            yield supervisors, {side: f"http://127.0.0.1:{port}" for side, port in ports.items()}
        finally:
            for supervisor in reversed(supervisors):
                await asyncio.to_thread(supervisor.close)


def _graph(hub: str, port: int, processes: int) -> dict[str, Any]:
    role = {
        "engine": "mock", "replicas": _WORKERS, "kv_blocks": _KV_BLOCKS, "mock": {"speedup": _SPEEDUP},
    }  # fmt: skip
    return {
        "model": "demo",
        "name": "routers",
        "supervision": {"spare_processes": 0},
        "runtime": {"hub": hub},
        "frontend": {"host": "127.0.0.1", "port": port, "processes": processes},
        "roles": {"aggregated": role},
    }


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
