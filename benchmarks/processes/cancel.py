"""Time from a client's disconnect to its free KV blocks, in prefill and in decode, on the paged engine.

Each client closes its socket. The time ends when `/admin/workers` reports no held block; one query's time is the limit.
"""

import argparse
import random
from collections.abc import Iterator
from http.client import HTTPConnection
from time import perf_counter, sleep
from urllib.parse import urlsplit

import msgspec
import numpy as np

from benchmarks.processes.served import Served, served
from penstock.bench.load import text
from penstock.bench.report import BenchReport
from penstock.core.errors import Unavailable
from penstock.deploy.state import load_admin_token

_DISCONNECTS, _QUICK_DISCONNECTS = 200, 20
_FREE_TIMEOUT_S = 10.0
_PREFILL_WORDS, _DECODE_WORDS = 1800, 20
_OUTPUT_TOKENS = 1000


class _Load(msgspec.Struct):
    active_blocks: int = 0
    running_requests: int = 0
    waiting_requests: int = 0


class _Worker(msgspec.Struct):
    load: _Load | None = None


class _Workers(msgspec.Struct):
    workers: list[_Worker]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--disconnects", type=int, metavar="N", help=f"clients that go away (default {_DISCONNECTS})"
    )
    parser.add_argument("--seed", type=int, default=0, help="of prompts and moments (default 0)")


def run(options: argparse.Namespace) -> BenchReport:
    count = options.disconnects or (_QUICK_DISCONNECTS if options.quick else _DISCONNECTS)
    rng = random.Random(options.seed)
    samples: dict[str, list[float]] = {"prefill_s": [], "decode_s": [], "ask_s": []}
    with served("--demo", "--workers", "1") as deployment:
        admin = _Admin(deployment)
        for index in range(count):
            in_prefill = index % 2 == 0
            freed_s = _hang_up(deployment, admin, rng, in_prefill=in_prefill)
            samples["prefill_s" if in_prefill else "decode_s"].append(freed_s)
            samples["ask_s"].append(admin.last_s)
    everything = samples["prefill_s"] + samples["decode_s"]
    return BenchReport(
        name="cancel",
        config={"disconnects": count, "seed": options.seed, "engine": "paged", "model": "demo"},
        figures=dict(
            _percentiles(
                cancel_to_free_ms=everything,
                cancel_to_free_prefill_ms=samples["prefill_s"],
                cancel_to_free_decode_ms=samples["decode_s"],
            )
        ),
        samples=samples,
        limits=dict(_percentiles(ask_ms=samples["ask_s"])),
    )


def _percentiles(**seconds: list[float]) -> Iterator[tuple[str, float]]:
    for name, values in seconds.items():
        for percentile in (50, 99):
            yield f"{name}_p{percentile}", float(np.percentile(values, percentile)) * 1000


class _Admin:
    """Asks how many blocks and requests the worker holds, on a connection of its own."""

    def __init__(self, deployment: Served) -> None:
        parts = urlsplit(deployment.url)
        self._http = HTTPConnection(parts.hostname or "", parts.port, timeout=_FREE_TIMEOUT_S)
        self._headers = {"Authorization": f"Bearer {load_admin_token()}"}
        self.last_s = 0.0

    def held(self) -> int:
        begin_s = perf_counter()
        self._http.request("GET", "/admin/workers", headers=self._headers)
        answer = msgspec.json.decode(self._http.getresponse().read(), type=_Workers)
        self.last_s = perf_counter() - begin_s
        loads = [worker.load for worker in answer.workers if worker.load is not None]
        return sum(load.active_blocks + load.running_requests + load.waiting_requests for load in loads)

    def wait(self, *, until_free: bool) -> None:
        """Poll until the worker holds something, or nothing."""
        give_up_s = perf_counter() + _FREE_TIMEOUT_S
        while (self.held() == 0) is not until_free:
            if perf_counter() > give_up_s:
                raise Unavailable(
                    f"the worker holds {self.held()} blocks and requests {_FREE_TIMEOUT_S:g} s later"
                )
            sleep(0.0005)


def _hang_up(deployment: Served, admin: _Admin, rng: random.Random, *, in_prefill: bool) -> float:
    """Begin a request, disconnect, and give the seconds until the worker holds nothing of it."""
    parts = urlsplit(deployment.url)
    client = HTTPConnection(parts.hostname or "", parts.port, timeout=_FREE_TIMEOUT_S)
    words = text(str(rng.random()), _PREFILL_WORDS if in_prefill else _DECODE_WORDS)
    body = {
        "model": deployment.model, "messages": [{"role": "user", "content": words}],
        "max_tokens": _OUTPUT_TOKENS, "ignore_eos": True, "stream": True,
    }  # fmt: skip
    client.request(
        "POST", "/v1/chat/completions", msgspec.json.encode(body), {"Content-Type": "application/json"}
    )
    if in_prefill:
        admin.wait(until_free=False)
    else:
        client.getresponse().read(256)
    sleep(rng.uniform(0, 0.02))
    begin_s = perf_counter()
    client.close()
    admin.wait(until_free=True)
    return perf_counter() - begin_s
