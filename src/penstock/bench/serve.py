"""`penstock bench serve`: load on a running OpenAI-compatible server, with latencies as its users see them."""

import argparse
import asyncio
import contextlib
import itertools
import resource
import time
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import uvloop
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from penstock.bench.client import Client, MeasuredRequest, RequestFailure, ServerAddress
from penstock.bench.load import (
    PROBES,
    PlannedRequest,
    Prompts,
    PromptScale,
    measure_burst,
    poisson,
    replay,
    run_load,
    steady,
)
from penstock.bench.report import BenchReport
from penstock.core.errors import ConfigError, Unavailable
from penstock.deploy.control.local_connector import FrontendAddress, find_frontend
from penstock.sim.trace import TraceRow, read_trace

_PERCENTILES = (50, 90, 99)
_SAMPLES_MAX = 10_000
"""Most raw values of one kind in a report; of more, every n-th is kept."""


@dataclass(frozen=True, slots=True)
class BenchTargets:
    """Targets of a good request: TTFT, and mean time per further token."""

    ttft_s: float | None = None
    itl_s: float | None = None

    def met(self, exchange: MeasuredRequest) -> bool:
        per_token_s = exchange.time_per_token_s
        return (self.ttft_s is None or exchange.ttft_s <= self.ttft_s) and (
            self.itl_s is None or per_token_s is None or per_token_s <= self.itl_s
        )


@dataclass(slots=True)
class Totals:
    """Sums exchanges as they end. One task owns it."""

    slo: BenchTargets
    requests: int = 0
    good: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    chunks: int = 0
    begin_s: float = float("inf")
    end_s: float = 0.0
    failures: Counter[str] = field(default_factory=Counter)
    _messages: dict[str, str] = field(default_factory=dict)
    _ttft_s: "array[float]" = field(default_factory=lambda: array("d"))
    _itl_s: "array[float]" = field(default_factory=lambda: array("d"))
    _gap_s: "array[float]" = field(default_factory=lambda: array("d"))
    _e2e_s: "array[float]" = field(default_factory=lambda: array("d"))
    _lag_s: "array[float]" = field(default_factory=lambda: array("d"))

    def add(self, exchange: MeasuredRequest) -> None:
        self.requests += 1
        self.begin_s = min(self.begin_s, exchange.due_s)
        self.end_s = max(self.end_s, exchange.end_s)
        self._lag_s.append(exchange.sent_s - exchange.due_s)
        if exchange.failure is not None:
            self.failures[exchange.failure] += 1
            self._messages.setdefault(exchange.failure, exchange.message)
            return
        self.good += self.slo.met(exchange)
        self.input_tokens += exchange.usage.prompt_tokens if exchange.usage else 0
        self.output_tokens += exchange.output_tokens
        self.chunks += 1 + len(exchange.gaps_s)
        self._ttft_s.append(exchange.ttft_s)
        self._e2e_s.append(exchange.e2e_s)
        if exchange.gaps_s:
            # With several tokens per chunk, the gap belongs to all of them.
            tokens_per_gap = max((exchange.output_tokens - 1) / len(exchange.gaps_s), 1.0)
            self._gap_s.extend(exchange.gaps_s)
            self._itl_s.extend([gap / tokens_per_gap for gap in exchange.gaps_s])

    def figures(self) -> dict[str, float]:
        succeeded = self.requests - self.failures.total()
        duration_s = max(self.end_s - self.begin_s, 1e-9) if self.requests else 0.0
        figures: dict[str, float] = {
            "requests": self.requests,
            "failed_requests": self.failures.total(),
            **{f"failed_{kind}": count for kind, count in self.failures.items()},
            "duration_s": duration_s,
        }
        if not succeeded:
            return figures
        figures |= {
            "requests_per_s": succeeded / duration_s,
            "input_tokens_per_s": self.input_tokens / duration_s,
            "output_tokens_per_s": self.output_tokens / duration_s,
        }
        if self.slo != BenchTargets():
            figures["goodput_requests_per_s"] = self.good / duration_s
            figures["goodput_fraction"] = self.good / self.requests
        for name, seconds in (
            ("ttft", self._ttft_s),
            ("itl", self._itl_s),
            ("chunk_gap", self._gap_s),
            ("e2e", self._e2e_s),
        ):
            figures |= _percentiles_ms(name, seconds)
        return figures | {
            "send_lag_ms_p99": _percentiles_ms("lag", self._lag_s)["lag_ms_p99"],
            "tokens_per_chunk": self.output_tokens / self.chunks,
            "input_tokens_mean": self.input_tokens / succeeded,
            "output_tokens_mean": self.output_tokens / succeeded,
        }

    def samples(self) -> Mapping[str, Sequence[float]]:
        return {
            "ttft_s": _thinned(self._ttft_s),
            "itl_s": _thinned(self._itl_s),
            "e2e_s": _thinned(self._e2e_s),
        }

    def problems(self) -> list[str]:
        """Give one line per kind of failure, with the first message."""
        return [
            f"{count} of {self.requests} requests failed: {kind}: {self._messages[kind]}"
            for kind, count in self.failures.most_common()
        ]


def _percentiles_ms(name: str, seconds: "array[float]") -> dict[str, float]:
    if not seconds:
        return {}
    values = np.percentile(np.frombuffer(seconds), _PERCENTILES) * 1000
    return {f"{name}_ms_p{p}": float(value) for p, value in zip(_PERCENTILES, values, strict=True)}


def _thinned(seconds: "array[float]") -> list[float]:
    step = -(-len(seconds) // _SAMPLES_MAX) or 1
    return [round(value, 6) for value in seconds[::step]]


_REQUESTS = 100
_CONCURRENCY = 16
_OPEN_CONCURRENCY = 4096
_QUICK_REQUESTS = 16
_QUICK_CONCURRENCY = 4
_QUICK_TOKENS = 16
_UNKNOWN_SCALE = PromptScale(overhead_tokens=0.0, tokens_per_word=1.3)
"""For a server without token counts: typical for common English words."""
_BURST_TOKENS = 64  # input and output tokens of burst requests beside a trace
_CONCURRENCY_WITH_BURST_MAX = 256  # for --rate and --trace, which set no concurrency
_REFRESH_S = 0.25
_ENDPOINTS = {"chat": "chat/completions", "completions": "completions"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--url",
        help="URL of the server (default: of your deployment that runs on this host; where none does,"
        " http://127.0.0.1:8000)",
    )
    add("--model", required=True, help="as GET /v1/models names it")
    add("--endpoint", choices=tuple(_ENDPOINTS), default="chat", help="which API to call (default chat)")
    add("--api-key", metavar="KEY", help="sent as a bearer token")

    load = parser.add_argument_group(
        "load", "closed (--concurrency), random (--rate) or as recorded (--trace)"
    )
    arrival = load.add_mutually_exclusive_group()
    arrival.add_argument(
        "--rate", type=_positive, metavar="R", help="Poisson arrivals, R requests per second"
    )
    arrival.add_argument(
        "--trace", type=Path, metavar="FILE", help="Azure CSV or Mooncake JSONL, plain or gzipped"
    )
    load.add_argument(
        "--requests",
        type=_count,
        metavar="N",
        help=f"number of requests (default {_REQUESTS}, the whole trace, or --duration)",
    )
    load.add_argument(
        "--concurrency",
        type=_count,
        metavar="C",
        help=f"most requests in flight (default {_CONCURRENCY}; {_OPEN_CONCURRENCY} with --rate and --trace)",
    )
    load.add_argument("--duration", type=_positive, metavar="S", help="send no request after S seconds")
    load.add_argument("--speed", type=_positive, metavar="X", help="run --trace X times as fast (default 1)")
    load.add_argument(
        "--input-tokens",
        type=_count,
        metavar="I",
        help="tokens of each prompt (default 128; with --trace the most)",
    )
    load.add_argument(
        "--output-tokens",
        type=_count,
        metavar="O",
        help="tokens of each answer (default 64; with --trace the most)",
    )
    load.add_argument(
        "--burst",
        type=_count,
        metavar="N",
        help="then measure bursts of N requests on new and on open connections, beside --concurrency others",
    )
    load.add_argument("--temperature", type=float, default=0.0, metavar="T", help="of sampling (default 0)")
    load.add_argument("--seed", type=int, default=0, help="seed of prompts and arrivals (default 0)")

    judge = parser.add_argument_group("judgement")
    judge.add_argument("--slo-ttft", type=_positive, metavar="S", help="goodput: TTFT target in seconds")
    judge.add_argument("--slo-itl", type=_positive, metavar="S", help="goodput: TPOT target in seconds")
    judge.add_argument(
        "--timeout",
        type=_positive,
        default=600.0,
        metavar="S",
        help="timeout of a request (default 600)",
    )
    judge.add_argument("--quickack", action="store_true", help="acknowledge packets at once (TCP_QUICKACK)")


def run(options: argparse.Namespace) -> BenchReport:
    """Run the load.

    Raises:
        ConfigError: invalid option, several deployments run, or the server does not serve the model.
        Unavailable: the server does not answer.
    """
    server = find_frontend(options.url, flags="--url")
    if options.speed and not options.trace:
        raise ConfigError("--speed: only with --trace; use --rate to send more a second")
    rows = read_trace(options.trace) if options.trace else []
    load = _settle(options, server, rows)
    _allow_many_connections()
    cpu_s = time.process_time()
    totals, scale = uvloop.run(_measure(options, server, load, rows))
    cpu_s = time.process_time() - cpu_s
    figures, samples = totals.figures(), dict(totals.samples())
    if figures["duration_s"]:
        figures["client_cpu_cores"] = cpu_s / figures["duration_s"]
    if options.burst:
        burst_figures, burst_samples = uvloop.run(_measure_burst(options, server, load, scale))
        figures |= burst_figures
        samples |= burst_samples
    return BenchReport(
        name="serve", config=load, samples=samples, figures=figures, problems=totals.problems()
    )


def _settle(options: argparse.Namespace, server: FrontendAddress, rows: list[TraceRow]) -> dict[str, Any]:
    """Fill in defaults; the result is the report's `config`."""
    quick, is_open = options.quick, bool(options.rate or options.trace)
    requests = options.requests
    if requests is None and not options.trace and (quick or options.duration is None):
        requests = _QUICK_REQUESTS if quick else _REQUESTS
    if options.trace:
        requests = min(requests or (_QUICK_REQUESTS if quick else len(rows)), len(rows))
    concurrency = _OPEN_CONCURRENCY if is_open else _QUICK_CONCURRENCY if quick else _CONCURRENCY
    tokens = None if options.trace else _QUICK_TOKENS if quick else None
    return {
        "url": server.url,
        "model": options.model,
        "endpoint": options.endpoint,
        "mode": "trace" if options.trace else "rate" if options.rate else "closed",
        "requests": requests,
        "concurrency": options.concurrency or concurrency,
        "rate_per_s": options.rate,
        "trace": options.trace and options.trace.name,
        "speed": options.speed or 1.0,
        "duration_s": options.duration,
        "input_tokens": options.input_tokens or (None if options.trace else 128),
        "output_tokens": options.output_tokens or tokens or (None if options.trace else 64),
        "temperature": options.temperature,
        "seed": options.seed,
        "slo_ttft_s": options.slo_ttft,
        "slo_itl_s": options.slo_itl,
        "timeout_s": options.timeout,
        "quickack": options.quickack,
        "burst": options.burst,
        "quick": quick,
    }


async def _measure(
    options: argparse.Namespace, server: FrontendAddress, load: dict[str, Any], rows: list[TraceRow]
) -> tuple[Totals, PromptScale]:
    client = _client(options, server)
    totals = Totals(BenchTargets(options.slo_ttft, options.slo_itl))

    async def send(planned: PlannedRequest, due_s: float | None) -> None:
        totals.add(await client.send(_body(load, planned), due_s))

    try:
        scale = await _probe(client, load)
        prompts = Prompts(options.seed, scale)
        with _progress(load["requests"]) as progress:
            async with asyncio.TaskGroup() as tasks:
                shown = tasks.create_task(_show(progress, totals))
                await run_load(
                    _plan(load, prompts, rows),
                    send,
                    concurrency=load["concurrency"],
                    duration_s=load["duration_s"],
                )
                shown.cancel()
    finally:
        client.close()
    return totals, scale


async def _measure_burst(
    options: argparse.Namespace, server: FrontendAddress, load: dict[str, Any], scale: PromptScale
) -> tuple[dict[str, float], dict[str, list[float]]]:
    prompts = Prompts(options.seed, scale)

    def make_body(number: int) -> bytes:
        prompt = prompts.unique(number, load["input_tokens"] or _BURST_TOKENS)
        return _body(load, PlannedRequest(prompt, load["output_tokens"] or _BURST_TOKENS))

    return await measure_burst(
        lambda: _client(options, server),
        make_body,
        size=options.burst,
        concurrency=min(load["concurrency"], _CONCURRENCY_WITH_BURST_MAX),
        quick=load["quick"],
    )


def _client(options: argparse.Namespace, server: FrontendAddress) -> Client:
    address = ServerAddress.parse(server.url, _ENDPOINTS[options.endpoint])
    return Client(
        address,
        timeout_s=options.timeout,
        quickack=options.quickack,
        api_key=options.api_key,
        tls=server.tls() if address.secure else None,
    )


def _plan(load: dict[str, Any], prompts: Prompts, rows: list[TraceRow]) -> Iterator[PlannedRequest]:
    lengths = (load["input_tokens"], load["output_tokens"])
    if rows:
        plan = replay(rows, prompts, speed=load["speed"], input_max=lengths[0], output_max=lengths[1])
    elif load["rate_per_s"]:
        plan = poisson(prompts, *lengths, rate=load["rate_per_s"], seed=load["seed"])
    else:
        plan = steady(prompts, *lengths)
    return itertools.islice(plan, load["requests"])


def _body(load: dict[str, Any], planned: PlannedRequest) -> bytes:
    """Encode a request with an exact output length (by the common extensions `min_tokens` and `ignore_eos`)."""
    prompt: dict[str, Any] = (
        {"messages": [{"role": "user", "content": planned.prompt}]}
        if load["endpoint"] == "chat"
        else {"prompt": planned.prompt}
    )
    return msgspec.json.encode(
        prompt
        | {
            "model": load["model"],
            "max_tokens": planned.output_tokens,
            "min_tokens": planned.output_tokens,
            "ignore_eos": True,
            "temperature": load["temperature"],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )


async def _probe(client: Client, load: dict[str, Any]) -> PromptScale:
    """Send two requests for one token: check the server, and fit its token counts.

    Raises:
        ConfigError: the server rejects the request.
        Unavailable: the server does not answer, or with an invalid answer.
    """
    counted = []
    for prompt in PROBES:
        exchange = await client.send(_body(load, PlannedRequest(prompt, output_tokens=1)))
        _raise_for(exchange, load)
        counted.append(exchange.usage.prompt_tokens if exchange.usage else 0)
    short, long = counted
    return PromptScale.fit((short, long)) if short else _UNKNOWN_SCALE


def _raise_for(exchange: MeasuredRequest, load: dict[str, Any]) -> None:
    failure, message = exchange.failure, exchange.message
    if failure is None:
        return
    if failure == RequestFailure.CONNECT:
        raise Unavailable(f"--url: {load['url']}: nobody answers ({message}); is the server started?")
    if failure in ("http_401", "http_403"):
        raise ConfigError(f"--api-key: {load['url']} answers {failure.removeprefix('http_')}: {message}")
    if failure in ("http_400", "http_404", "http_422"):
        raise ConfigError(
            f"--model {load['model']}: {load['url']} answers {failure.removeprefix('http_')}: {message}"
        )
    raise Unavailable(f"--url: {load['url']}: a first request failed: {failure}: {message}")


def _progress(total: int | None) -> Progress:
    console = Console(stderr=True)
    progress = Progress(
        TextColumn("{task.completed} requests"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[rate]}"),
        console=console,
        auto_refresh=False,
        transient=True,
        disable=not console.is_terminal,
    )
    progress.add_task("", total=total, rate="")
    return progress


async def _show(progress: Progress, totals: Totals) -> None:
    """Update the progress bar until cancelled."""
    (task,) = progress.task_ids
    tokens = 0
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            await asyncio.sleep(_REFRESH_S)
            rate = (totals.output_tokens - tokens) / _REFRESH_S
            tokens = totals.output_tokens
            failed = totals.failures.total()
            progress.update(
                task,
                completed=totals.requests,
                rate=f"{rate:,.0f} tokens/s" + (f", {failed} failed" if failed else ""),
            )
            progress.refresh()


def _allow_many_connections() -> None:
    """Raise the limit of open files to the hard limit: each connection is a file."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _count(value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number >= 1, got {value!r}")
    return int(value)


def _positive(value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number > 0, got {value!r}")
    return number
