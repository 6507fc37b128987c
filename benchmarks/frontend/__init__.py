"""CPU time and latencies of a frontend before mock workers, beside NVIDIA Dynamo's before its own, if one is installed.

Server, workers and load generator (`load.c`) are processes of their own. The two sides take turns in every round.
"""

import argparse
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from benchmarks.frontend.load import Load, Loaded, Prompts
from benchmarks.frontend.servers import (
    Server,
    anonymous_mb,
    cpu_s,
    idle_cpu_share,
    make_model,
    ours,
    peer,
    resident_mb,
)
from benchmarks.runner import expect_at_least
from penstock.bench.report import BenchReport

_OUTPUT_TOKENS = 64
_IDLE_S = 5.0
_PACED_TOKENS = 250
_WIDE = 256
_BURST = 500
_LONG_WORDS = 6_000
_MEMORY_FIGURES = {0: "a_tenth", 4: "half", 9: "all"}
"""Of the tenths of the requests, those that are figures."""
_CASES = ("instant", "crowds", "paced", "long-prompts", "unseen-prompts", "two", "memory")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = os.environ.get("PENSTOCK_PEERS", "~/.cache/penstock/peers")
    parser.add_argument(
        "--rounds", type=int, default=5, metavar="N", help="of everything; medians count (default 5)"
    )
    parser.add_argument(
        "--requests",
        type=int,
        default=1_000,
        metavar="N",
        help="of a round at concurrency 64 (default 1,000)",
    )
    parser.add_argument(
        "--memory-requests", type=int, default=20_000, metavar="N", help="of `memory` (default 20,000)"
    )
    parser.add_argument("--cases", nargs="+", choices=_CASES, default=_CASES, help="(default: all)")
    parser.add_argument(
        "--peers",
        type=Path,
        default=Path(default),
        metavar="DIR",
        help="where peers are installed (default $PENSTOCK_PEERS, else ~/.cache/penstock/peers)",
    )


def run(options: argparse.Namespace) -> BenchReport:
    """Run the cases.

    Raises:
        ConfigError: there is no C compiler, or an option makes no sense.
        Unavailable: a server does not start.
    """
    expect_at_least(options, rounds=1, requests=64, memory_requests=1_000)
    if options.quick:
        options.rounds, options.requests, options.memory_requests = 1, 128, 1_000
    samples: dict[str, list[float]] = {}
    problems: list[str] = []
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as directory:
        bench = _Bench(options, Path(directory), samples, problems)
        for case in options.cases:
            getattr(bench, case.replace("-", "_"))()
    figures = {name: statistics.median(values) for name, values in samples.items()}
    return BenchReport(
        name="frontend",
        config={
            "rounds": options.rounds,
            "requests": options.requests,
            "memory_requests": options.memory_requests,
            "cases": list(options.cases),
            "output_tokens": _OUTPUT_TOKENS,
            "paced_tokens": _PACED_TOKENS,
            "workers": 2,
            "peer": bench.peer_version,
            "quick": options.quick,
        },
        figures=figures | _ratios(figures),
        samples=samples,
        problems=problems,
    )


class _Bench:
    """Runs cases, and keeps samples by figure."""

    def __init__(
        self,
        options: argparse.Namespace,
        directory: Path,
        samples: dict[str, list[float]],
        problems: list[str],
    ) -> None:
        self._options = options
        self._directory = directory
        self._samples = samples
        self._problems = problems
        self._load = Load(directory)
        self._model = make_model(directory / "model")
        self._peer = options.peers.expanduser() / "dynamo" / "venv" / "bin" / "python"
        self.peer_version = "ai-dynamo 1.6.1" if self._peer.exists() else None

    def instant(self) -> None:
        """Workers that take no time: streams and unary answers, 64 at once and one at a time."""
        stream, unary = Prompts(_OUTPUT_TOKENS), Prompts(_OUTPUT_TOKENS, stream=False)
        requests, rounds = self._options.requests, self._options.rounds
        with ours(self._model) as server, self._peer_server(1e6) as other:
            servers = [server, *other]
            for each in servers:
                self._note(
                    each,
                    {
                        "idle_cpu_share": idle_cpu_share(each.pid, _IDLE_S),
                        "idle_rss_mb": resident_mb(each.pid),
                    },
                )
                self._warm(each, stream)
            for _ in range(rounds):
                for each in servers:
                    streamed = self._run(each, stream, 64, requests)
                    whole = self._run(each, unary, 64, requests)
                    single = self._run(each, stream, 1, max(requests // 5, 32))
                    self._note(
                        each,
                        {
                            "stream_cpu_s_per_1000": 1e3 * streamed.server_cpu_s / requests,
                            "stream_events_per_answer": streamed.events / streamed.answers,
                            "stream_requests_per_s": requests / streamed.seconds,
                            "unary_cpu_s_per_1000": 1e3 * whole.server_cpu_s / requests,
                            "unary_requests_per_s": requests / whole.seconds,
                            "load_cpu_s_per_1000": 1e3 * streamed.cpu_s / requests,
                            "ttfb_ms_p50_c1": single.ttfb_ms_p50,
                            "ttfb_ms_p99_c1": single.ttfb_ms_p99,
                            "failures": streamed.failures + whole.failures + single.failures,
                        },
                    )  # fmt: skip
            for each in servers:
                self._note(each, {"rss_mb": resident_mb(each.pid)})

    def crowds(self) -> None:
        """256 streams at once, and 500 at once over new connections; workers take no time."""
        stream = Prompts(_OUTPUT_TOKENS)
        with ours(self._model) as server, self._peer_server(1e6) as other:
            for each in (server, *other):
                self._warm(each, stream)
            for _ in range(self._options.rounds):
                for each in (server, *other):
                    wide = self._run(each, stream, _WIDE, max(self._options.requests, _WIDE))
                    burst = self._run(each, stream, _BURST, _BURST)
                    self._note(
                        each,
                        {
                            "ttfb_ms_p99_c256": wide.ttfb_ms_p99,
                            "ttfb_ms_p99_burst": burst.ttfb_ms_p99,
                            "crowd_failures": wide.failures + burst.failures,
                        },
                    )

    def paced(self) -> None:
        """Tokens one by one, about 7 ms apart in each of 64 streams."""
        prompts = Prompts(_PACED_TOKENS)
        requests = 64 if self._options.quick else 128
        with ours(self._model, speedup=0.5) as server, self._peer_server(1.0) as other:
            for each in (server, *other):
                self._load.check(each, prompts)
            for _ in range(self._options.rounds):
                for each in (server, *other):
                    done = self._run(each, prompts, 64, requests)
                    tokens = requests * _PACED_TOKENS
                    self._note(
                        each,
                        {
                            "paced_cpu_s_per_million_tokens": 1e6 * done.server_cpu_s / tokens,
                            "paced_events_per_answer": done.events / done.answers,
                            "paced_tokens_per_s": tokens / done.seconds,
                            "paced_gap_ms_p50": done.gap_ms_p50,
                            "paced_gap_ms_p99": done.gap_ms_p99,
                        },
                    )

    def long_prompts(self) -> None:
        """Streams without and with prompts of 6,000 words beside them, one after the other.

        The workers have all of these prompts but the end, so that only the frontend's work on them counts: it decodes, tokenizes
        and routes them whole.
        """
        with ours(self._model, speedup=0.5) as server:
            self._beside_long(
                server, Prompts(1, words=_LONG_WORDS, stream=False, number_last=True), "long_prompts"
            )

    def unseen_prompts(self) -> None:
        """The same, with 6,000 words of which the server saw none before, and workers that take no time for prompts.

        The frontend tokenizes new words, and routes prompts, sends them and hears of their KV from the first block on.
        """
        with ours(self._model, speedup=0.5, free_prefill=True) as server:
            long = Prompts(1, words=_LONG_WORDS, stream=False, unseen=True)
            self._beside_long(server, long, "unseen_prompts")

    def _beside_long(self, server: Server, long: Prompts, name: str) -> None:
        streams = Prompts(_PACED_TOKENS)
        self._run(server, long, 1, 4)
        for _ in range(self._options.rounds):
            alone = self._run(server, streams, 16, 16)
            before_s, beside = cpu_s(server.pid), self._load.start(server, long, 1, 1_000_000)
            with_long = self._run(server, streams, 16, 16)
            beside.terminate()
            done = self._load.loaded(server, beside, before_s)
            self._note(
                server,
                {
                    f"{name}_per_s": done.answers / done.seconds,
                    f"gap_ms_p99_beside_no_{name}": alone.gap_ms_p99,
                    f"gap_ms_p99_{name}": with_long.gap_ms_p99,
                    f"gap_ms_p99_added_by_{name}": with_long.gap_ms_p99 - alone.gap_ms_p99,
                },
            )

    def two(self) -> None:
        """The throughput of two frontends over one's, on as many cores as the machine has."""
        prompts, requests = Prompts(_OUTPUT_TOKENS), 2 * self._options.requests
        rates = []
        for frontends in (1, 2):
            with ours(self._model, frontends=frontends) as server:
                self._run(server, prompts, 64, 128)
                done = [self._run(server, prompts, 64, requests) for _ in range(self._options.rounds)]
                rates.append(statistics.median(requests / each.seconds for each in done))
        self._samples["two_frontends_speedup"] = [rates[1] / rates[0]]

    def memory(self) -> None:
        """Resident memory after each tenth of many requests."""
        prompts, requests = Prompts(4, stream=False), self._options.memory_requests
        with ours(self._model) as server:
            for tenth in range(10):
                self._run(server, prompts, 64, (tenth + 1) * requests // 10 - tenth * requests // 10)
                found = {"memory_mb": resident_mb(server.pid), "anonymous_mb": anonymous_mb(server.pid)}
                self._note(server, found)
                if tenth in _MEMORY_FIGURES:
                    when = _MEMORY_FIGURES[tenth]
                    self._note(server, {f"{name}_after_{when}": value for name, value in found.items()})

    def _peer_server(self, speedup: float) -> AbstractContextManager[Sequence[Server]]:
        return peer(self._peer, self._model, self._directory, speedup=speedup)

    def _warm(self, server: Server, prompts: Prompts) -> None:
        self._load.check(server, prompts)
        self._run(server, prompts, 64, 128)

    def _run(self, server: Server, prompts: Prompts, connections: int, requests: int) -> Loaded:
        done = self._load.run(server, prompts, connections, requests)
        if done.failures:
            self._problems.append(
                f"{server.name}: {done.failures} of {requests} failed, first: {done.failure}"
            )
        return done

    def _note(self, server: Server, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._samples.setdefault(f"{server.name}_{name}", []).append(value)


def _ratios(figures: Mapping[str, float]) -> dict[str, float]:
    """Give ours over the peer's, for each figure that both have."""
    names: Sequence[str] = [name.removeprefix("ours_") for name in figures if name.startswith("ours_")]
    return {
        f"ratio_{name}": figures[f"ours_{name}"] / figures[f"peer_{name}"]
        for name in names
        if figures.get(f"peer_{name}")
    }
