"""vLLM behind Penstock: prefix hits of two workers by policy, overhead over vLLM's own server, and a worker that is killed.

It runs where vLLM is installed beside Penstock. The model is random, of 5 million parameters in float32, so what is
measured is everything but the model. Each vLLM takes the better part of a minute to start, with `--quick` as well.
"""

import argparse
import asyncio
import contextlib
import importlib.metadata
import importlib.util
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil

from benchmarks.processes.chats import Answer, Asked, Chats, Conversations, chatting
from benchmarks.processes.engine import SIZES
from benchmarks.processes.served import Served, put_load, served
from penstock.bench.prompts import text
from penstock.bench.report import Report
from penstock.core.errors import ConfigError, Unavailable

_BLOCK = 32
_CONTEXT = 4096
_ENGINE = {"enforce_eager": True, "max_num_seqs": 64, "max_num_batched_tokens": 2048}
_CPU = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
_START_TIMEOUT_S = 600.0
_CONCURRENCY = 32
_STREAMS, _STREAM_TOKENS, _KILL_AT_PIECE = 8, 160, 20
_FULL = Conversations(
    groups=6,
    conversations_per_group=6,
    turns=6,
    system_words=96,
    turn_words=32,
    answer_tokens=16,
    concurrency=6,
)
_QUICK = Conversations(
    groups=2,
    conversations_per_group=2,
    turns=2,
    system_words=96,
    turn_words=32,
    answer_tokens=8,
    concurrency=4,
)
_CONVERSATION_TOKENS = 1700  # of one at its end; a word of these prompts has four to five tokens
_ROOM = 0.7
"""KV blocks of one worker, as a share of what all conversations take."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--rounds", type=int, metavar="N", help="of the comparison with vLLM's server, in turns (default 3)")
    add("--seed", type=int, default=0, help="of weights and prompts (default 0)")


def run(options: argparse.Namespace) -> Report:
    """Measure all three.

    Raises:
        ConfigError: vLLM or the packages for its checkpoint are not installed.
    """
    missing = [
        package for package in ("vllm", "torch", "transformers") if importlib.util.find_spec(package) is None
    ]
    if missing:
        raise ConfigError(
            f"{' and '.join(missing)} not installed here; run it by the Python of an environment with vLLM and Penstock,"
            " such as that of `make test-vllm`"
        )
    from tests.support.checkpoints import make_checkpoint  # noqa: PLC0415 - its packages are an extra

    os.environ.update(_CPU)  # of both servers
    load = _QUICK if options.quick else _FULL
    rounds = options.rounds or (1 if options.quick else 3)
    blocks = _blocks(load)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as directory:
        model = make_checkpoint(Path(directory) / "llama-5m", "llama", seed=options.seed, **SIZES)
        held: dict[str, Asked] = {}
        with _penstock(model, blocks, workers=2, policy="kv") as deployment:
            held["kv"] = asyncio.run(chatting(deployment, lambda chats: chats.converse(load)))
            streams = asyncio.run(chatting(deployment, _kill_midstream))
        with _penstock(model, blocks, workers=2, policy="round-robin") as deployment:
            held["round_robin"] = asyncio.run(chatting(deployment, lambda chats: chats.converse(load)))
        with _penstock(model, blocks, workers=1, policy="kv") as ours, _vllm(model, blocks) as theirs:
            samples = _in_turns({"penstock": ours, "vllm": theirs}, rounds, quick=options.quick)
    figures = _hit_figures(held) | _overhead_figures(samples) | streams
    return Report(
        name="vllm",
        config={
            "model": SIZES | {"architecture": "llama", "dtype": "float32"},
            "engine_args": _ENGINE | {"block_size": _BLOCK, "kv_blocks": blocks},
            "environment": _CPU,
            "conversations": {name: getattr(load, name) for name in Conversations.__slots__},
            "concurrency": _CONCURRENCY,
            "streams": _STREAMS,
            "rounds": rounds,
            "seed": options.seed,
            "quick": options.quick,
            "versions": {name: _version(name) for name in ("vllm", "torch", "transformers")},
        },
        samples=samples
        | {f"{name}_chat_ttft_s": [one.ttft_s for one in asked.answers] for name, asked in held.items()},
        figures=figures,
        problems=[] if options.quick else list(_problems(figures)),
    )


def _blocks(load: Conversations) -> int:
    """Give each worker's KV blocks: too few for all conversations, enough for half of them."""
    every = load.groups * load.conversations_per_group * _CONVERSATION_TOKENS / _BLOCK
    return max(round(_ROOM * every), 4 * _CONTEXT // _BLOCK)


def _penstock(
    model: Path, blocks: int, *, workers: int, policy: str
) -> contextlib.AbstractContextManager[Served]:
    role = {"kv_blocks": blocks, "weight_dtype": "float32"}
    settings = {f"roles.aggregated.{name}": value for name, value in role.items()}
    settings |= {"block_size": _BLOCK, "context_length": _CONTEXT}
    return served(
        str(model), "--engine", "vllm", f"--workers={workers}", f"--policy={policy}",
        *(f"--engine-arg={name}={str(value).lower()}" for name, value in _ENGINE.items() if name == "enforce_eager"),
        f"--set=roles.aggregated.max_running_requests={_ENGINE['max_num_seqs']}",
        f"--set=roles.aggregated.max_batch_tokens={_ENGINE['max_num_batched_tokens']}",
        *(f"--set={name}={value}" for name, value in settings.items()),
    )  # fmt: skip


@contextlib.contextmanager
def _vllm(model: Path, blocks: int) -> Iterator[Served]:
    """Run vLLM's OpenAI server with the arguments that Penstock's adapter gives to its engine."""
    given = {
        "model": model, "block-size": _BLOCK, "max-model-len": _CONTEXT, "num-gpu-blocks-override": blocks,
        "dtype": "float32", "max-num-seqs": _ENGINE["max_num_seqs"], "kv-cache-memory-bytes": 1 << 30,
        "max-num-batched-tokens": _ENGINE["max_num_batched_tokens"], "prefix-caching-hash-algo": "sha256_cbor",
        "scheduling-policy": "priority", "served-model-name": "m", "host": "127.0.0.1", "port": (port := _free_port()),
    }  # fmt: skip
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--enforce-eager",
        "--disable-log-stats",
    ]
    command += [f"--{name}={value}" for name, value in given.items()]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | {"VLLM_HOST_IP": "127.0.0.1"}
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(process, url)
            yield Served(url, "m")
        except Unavailable:
            log.seek(0)
            sys.stderr.write(log.read()[-4000:])
            raise
        finally:
            _end(process)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _wait(process: "subprocess.Popen[bytes]", url: str) -> None:
    give_up_s = time.perf_counter() + _START_TIMEOUT_S
    while True:
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            urllib.request.urlopen(f"{url}/health", timeout=5)
            return
        if process.poll() is not None or time.perf_counter() > give_up_s:
            raise Unavailable("vLLM's server did not become ready; its last words stand above")
        time.sleep(0.5)


def _end(process: "subprocess.Popen[bytes]") -> None:
    every = [*psutil.Process(process.pid).children(recursive=True)] if process.poll() is None else []
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=30)
    for one in every:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    process.kill()
    process.wait()


def _in_turns(servers: dict[str, Served], rounds: int, *, quick: bool) -> dict[str, list[float]]:
    """Put the same loads on both servers in turns, while the other is idle."""
    samples: dict[str, list[float]] = {}
    requests = _CONCURRENCY * (1 if quick else 8)
    for number in range(-1, rounds):
        ordered = list(servers.items())
        for name, server in ordered if number % 2 else reversed(ordered):
            common = {"endpoint": "completions", "input-tokens": 128, "seed": number + 1}
            busy = put_load(
                server, common | {"requests": requests, "concurrency": _CONCURRENCY, "output-tokens": 64}
            )
            alone = put_load(
                server, common | {"requests": 4 if quick else 40, "concurrency": 1, "output-tokens": 8}
            )
            if number < 0:
                continue  # a round to warm up
            for report in (busy, alone):
                if report.problems:
                    raise Unavailable(f"{name}: {report.problems[0]}")
            samples.setdefault(f"{name}_tokens_per_s_c32", []).append(busy.figures["output_tokens_per_s"])
            samples.setdefault(f"{name}_ttft_ms_c1", []).append(alone.figures["ttft_ms_p50"])
            samples.setdefault(f"{name}_ttft_ms_c32", []).append(busy.figures["ttft_ms_p50"])
    return samples


async def _kill_midstream(chats: Chats) -> dict[str, float]:
    """Stream, then stream the same again and kill one of the two workers in the middle; compare the texts."""
    prompts = [[{"role": "user", "content": text(f"stream {index}", 48)}] for index in range(_STREAMS)]
    expected = [await chats.ask(prompt, _STREAM_TOKENS) for prompt in prompts]
    pieces, victim = [0] * _STREAMS, _worker()

    async def one(index: int) -> Answer:
        def count() -> None:
            pieces[index] += 1
            if min(pieces) == _KILL_AT_PIECE and pieces[index] == _KILL_AT_PIECE:
                victim.kill()

        return await chats.ask(prompts[index], _STREAM_TOKENS, on_piece=count)

    answers = await asyncio.gather(*(one(index) for index in range(_STREAMS)))
    exact = sum(answer.text == wanted.text for answer, wanted in zip(answers, expected, strict=True))
    return {
        "killed_streams": _STREAMS,
        "killed_streams_exact": exact,
        "killed_longest_gap_ms": max(gap for answer in answers for gap in [*answer.gaps_s, 0.0]) * 1000,
    }


def _worker() -> psutil.Process:
    for process in psutil.Process().children(recursive=True):
        if "worker-1" in " ".join(process.cmdline()).split():
            return process
    raise Unavailable("no process of worker-1 is found")


def _hit_figures(held: dict[str, Asked]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for name, asked in held.items():
        figures[f"{name}_prompt_tokens"] = asked.total("prompt_tokens")
        figures[f"{name}_hit_tokens"] = asked.total("cached_tokens")
        figures[f"{name}_chat_ttft_ms_p50"] = statistics.median(one.ttft_s for one in asked.answers) * 1000
        figures[f"{name}_turns_per_s"] = len(asked.answers) / asked.duration_s
    figures["hit_tokens_kv_over_round_robin"] = figures["kv_hit_tokens"] / max(
        figures["round_robin_hit_tokens"], 1
    )
    return figures


def _overhead_figures(samples: dict[str, list[float]]) -> dict[str, float]:
    figures = {name: statistics.median(values) for name, values in samples.items()}
    figures["tokens_per_s_over_vllm"] = (
        figures["penstock_tokens_per_s_c32"] / figures["vllm_tokens_per_s_c32"]
    )
    figures["ttft_ms_more_than_vllm"] = figures["penstock_ttft_ms_c1"] - figures["vllm_ttft_ms_c1"]
    return figures


def _problems(figures: dict[str, float]) -> Iterator[str]:
    if figures["killed_streams_exact"] < figures["killed_streams"]:
        yield f"{figures['killed_streams_exact']:g} of {_STREAMS} streams went on exactly after a worker was killed"


def _version(package: str) -> str:
    for name in (package, f"{package}-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return "unknown"
