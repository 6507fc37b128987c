"""Whether a flooding tenant moves another's TTFT: real processes, with one frontend and with two; both halves in the same run."""

import argparse
import asyncio
import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
import uvloop

from benchmarks.frontend.servers import machine_idle_s, make_model
from benchmarks.processes.served import Served, served
from benchmarks.runner import expect_at_least
from benchmarks.tenants.load import Client, Flooded, Prompts, session
from penstock.bench.report import BenchReport
from penstock.core.errors import ConfigError
from penstock.frontend.limits.keys import hash_of, new_key

_ROUNDS, _SECONDS, _QUICK_SECONDS = 3, 8.0, 3.0
_RATE_PER_S = 8.0
_TOKENS, _OUTPUT_TOKENS = 1_000, 8
_SPEEDUP = 0.5
_CONNECTIONS = 96
_QUEUE_MAX = 64
_CONTEXT_LENGTH = 40_000
_KV_BLOCKS = 16_000
_WARM_S, _CALM_S = 3.0, 1.0
_ADAPTERS = tuple(f"adapter-{number}" for number in range(40))


@dataclass(frozen=True, slots=True)
class _Flood:
    tokens: int
    adapters: tuple[str, ...] = ()


_FLOODS = {
    "1000": _Flood(1_000),
    "1000_40_adapters": _Flood(1_000, _ADAPTERS),
    "8000": _Flood(8_000),
    "32000": _Flood(32_000),
}
_FRONTENDS = {1: "one", 2: "two"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--frontends",
        type=int,
        nargs="+",
        choices=_FRONTENDS,
        default=[1, 2],
        help="frontend processes (default 1 2)",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=_ROUNDS,
        metavar="N",
        help=f"each a deployment of its own; medians count (default {_ROUNDS})",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=_SECONDS,
        metavar="S",
        help=f"of each half (default {_SECONDS:g})",
    )
    parser.add_argument(
        "--floods", nargs="+", choices=_FLOODS, default=list(_FLOODS), help="prompt tokens (default: all)"
    )


def run(options: argparse.Namespace) -> BenchReport:
    """Measure every flood.

    Raises:
        ConfigError: an option makes no sense.
        Unavailable: a deployment does not start, or a request fails.
    """
    expect_at_least(options, rounds=1)
    if not options.seconds > 0:
        raise ConfigError(f"--seconds: must be > 0, got {options.seconds}")
    if options.quick:
        options.rounds, options.seconds, options.frontends = 1, _QUICK_SECONDS, options.frontends[:1]
    samples: dict[str, list[float]] = {}
    figures: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        directory = Path(name)
        make_model(directory / "model")
        for frontends in dict.fromkeys(options.frontends):
            for number in range(options.rounds):
                with _deployment(directory, frontends) as (server, keys):
                    halves = uvloop.run(_round(server, keys, options.floods, options.seconds, number))
                for half, (ttfts_s, flooded, busy_cores) in halves.items():
                    prefix = f"{_FRONTENDS[frontends]}_{half}"
                    samples.setdefault(f"{prefix}_ttft_s", []).extend(ttfts_s)
                    figures.setdefault(f"{prefix}_busy_cores", []).append(busy_cores)
                    for figure, value in figures_of(ttfts_s, halves["alone"][0], flooded).items():
                        figures.setdefault(f"{prefix}_{figure}", []).append(value)
    return BenchReport(
        name="tenants",
        config={
            "rounds": options.rounds,
            "seconds": options.seconds,
            "frontends": options.frontends,
            "workers": 2,
            "mock_speedup": _SPEEDUP,
            "prompt_tokens": _TOKENS,
            "rate_per_s": _RATE_PER_S,
            "output_tokens": _OUTPUT_TOKENS,
            "flood_connections": _CONNECTIONS,
            "requests_max": _QUEUE_MAX,
            "quick": options.quick,
        },
        figures={name: median(values) for name, values in figures.items()},
        samples=samples,
    )


def figures_of(ttfts_s: list[float], alone_s: list[float], flooded: Flooded | None) -> Mapping[str, float]:
    """Give percentiles of one half, and where another tenant floods, what that moved and what the flood got."""
    figures = {f"ttft_ms_p{rank}": 1e3 * float(np.percentile(ttfts_s, rank)) for rank in (50, 99)}
    if flooded is None:
        return figures
    for rank in (50, 99):
        figures[f"p{rank}_over_alone"] = figures[f"ttft_ms_p{rank}"] / (
            1e3 * float(np.percentile(alone_s, rank))
        )
    figures["flood_requests_per_s"] = flooded.answers / flooded.seconds
    figures["flood_refusals_per_s"] = flooded.refusals / flooded.seconds
    return figures


async def _round(
    server: Served, keys: Mapping[str, str], floods: list[str], seconds: float, seed: int
) -> dict[str, tuple[list[float], Flooded | None, float]]:
    """Measure the modest tenant alone, before any other one was seen, and then beside each flood."""
    halves: dict[str, tuple[list[float], Flooded | None, float]] = {}
    async with session(keeps=False) as own, session(keeps=True) as others:
        modest = Client(server, own, keys["modest"], Prompts(tokens=_TOKENS, output_tokens=_OUTPUT_TOKENS))
        await modest.ask_at(_RATE_PER_S, _WARM_S, seed)  # imports and first connections
        halves["alone"] = await _measured(modest, None, seconds, seed)
        for name in floods:
            flood, flooded = _FLOODS[name], Flooded()
            prompts = Prompts(tokens=flood.tokens, output_tokens=_OUTPUT_TOKENS, adapters=flood.adapters)
            client = Client(server, others, keys["flooding"], prompts)
            flooding = asyncio.create_task(client.flood(_CONNECTIONS, flooded))
            await asyncio.sleep(_CALM_S)
            half = await _measured(modest, flooded, seconds, seed)
            if flooding.done():
                flooding.result()  # says what went wrong
            flooding.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await flooding
            halves[f"flood_{name}"] = half
            await asyncio.sleep(_CALM_S)
            await modest.ask()
    return halves


async def _measured(
    modest: Client, flooded: Flooded | None, seconds: float, seed: int
) -> tuple[list[float], Flooded | None, float]:
    """Have the modest tenant ask, and give with its TTFTs how many cores were busy."""
    began_s, idle_s = perf_counter(), machine_idle_s()
    ttfts_s = await modest.ask_at(_RATE_PER_S, seconds, seed)
    idle_cores = (machine_idle_s() - idle_s) / (perf_counter() - began_s)
    return ttfts_s, flooded, (os.cpu_count() or 1) - idle_cores


@contextlib.contextmanager
def _deployment(directory: Path, frontends: int) -> Iterator[tuple[Served, Mapping[str, str]]]:
    """Serve with two paced mock workers, and give the keys of both tenants."""
    keys = {name: new_key() for name in ("modest", "flooding")}
    file = directory / "keys.yaml"
    lines = (f"  {name}:\n    keys: [{hash_of(key)}]\n" for name, key in keys.items())
    file.write_text("tenants:\n" + "".join(lines))
    flags = {
        "engine": "mock",
        "workers": 2,
        "mock-speedup": _SPEEDUP,
        "frontend-processes": frontends,
        "api-key-file": file,
    }
    settings = {
        "context_length": _CONTEXT_LENGTH,
        "roles.aggregated.kv_blocks": _KV_BLOCKS,
        "roles.aggregated.adapters": f"[{', '.join(_ADAPTERS)}]",
        "router.queue.requests_max": _QUEUE_MAX,
    }
    words = [f"--{name}={value}" for name, value in flags.items()]
    words += [f"--set={name}={value}" for name, value in settings.items()]
    with served(str(directory / "model"), *words) as server:
        yield server, keys
