"""Conversations of more KV than devices hold, on served engines: without a host tier, and with one.

Every user's turn comes after a turn of all others, so that without a host tier most histories are evicted when they are
needed. The third deployment has the host tier's bytes as device blocks: on a CPU that is the same memory, and the least
that any tier could take. Deployments take turns; figures are medians over the rounds. With engine paged, shorter
conversations then go on with two workers of a host, and across a SIGKILL of everything (`survival`).
"""

import argparse
import asyncio
import contextlib
import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.kv.survival import restart, share_host
from benchmarks.processes.chats import Answer, Asked, Chats, Conversations, chatting
from benchmarks.processes.engine import SIZES
from benchmarks.processes.served import served
from benchmarks.runner import expect_at_least
from penstock.bench.report import BenchReport

_PAGED = ("--demo", "--set", "roles.aggregated.weight_dtype=float32")
"""float32: in bfloat16 a cached prefix changes the rounding, and with it an answer now and then."""
_COMMON = ("--workers", "1", "--log-level", "error")
_VLLM = (
    "--engine", "vllm", "--engine-arg=enforce_eager=true", "--set=roles.aggregated.weight_dtype=float32", "--set=block_size=32",
    "--set=context_length=4096", "--set=roles.aggregated.max_running_requests=64", "--set=roles.aggregated.max_batch_tokens=2048",
)  # fmt: skip
_VLLM_CPU = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
_LESS_TTFT_WANTED = 0.5
_ITL_RATIO_MAX = 1.1
_OVER_DEVICE_MAX = 1.1
_TIER_FACTOR = 4
"""Blocks of the host tier for each of the device."""
_FULL = {
    "paged": {"users": 80, "turns": 10, "kv_blocks": 2000, "rounds": 1},
    "vllm": {"users": 24, "turns": 6, "kv_blocks": 330, "rounds": 1},
}
"""Device blocks for about a quarter of all KV. vLLM takes the better part of a minute to start."""
_SHORTER = 3
"""Conversations of two workers and of a restart: a third of the users, half of the turns, and a sixth of the blocks."""
_QUICK = {"users": 24, "turns": 4, "kv_blocks": 220, "rounds": 1}
_NONE, _HOST, _DEVICE = "device", "host", "all_on_device"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--engine",
        choices=tuple(_FULL),
        default="paged",
        help="default paged; vllm runs where vLLM is installed",
    )
    add("--users", type=int, metavar="N", help="conversations (default 80, with vllm 24)")
    add("--turns", type=int, metavar="N", help="of each conversation (default 10, with vllm 6)")
    add("--kv-blocks", type=int, metavar="N", help="on the device (default about a quarter of all KV)")
    add("--concurrency", type=int, default=4, metavar="N", help="requests at a time (default 4)")
    add("--rounds", type=int, metavar="N", help="of all deployments (default 1)")


def run(options: argparse.Namespace) -> BenchReport:
    """Hold the same conversations with each deployment.

    Raises:
        ConfigError: an option makes no sense.
        Unavailable: a deployment does not start.
    """
    for name, value in (_QUICK if options.quick else _FULL[options.engine]).items():
        if options.quick or getattr(options, name) is None:
            setattr(options, name, value)
    expect_at_least(options, users=1, turns=1, kv_blocks=1, concurrency=1, rounds=1)
    blocks, tier = options.kv_blocks, f"{_TIER_FACTOR}x"
    deployments = {
        _NONE: ("--set", f"roles.aggregated.kv_blocks={blocks}"),
        _HOST: ("--set", f"roles.aggregated.kv_blocks={blocks}", "--kv-host", tier),
        _DEVICE: ("--set", f"roles.aggregated.kv_blocks={blocks * (1 + _TIER_FACTOR)}"),
    }
    load = Conversations(
        groups=options.users, conversations_per_group=1, turns=options.turns, system_words=60, turn_words=50,
        answer_tokens=24, concurrency=options.concurrency,
    )  # fmt: skip
    runs: dict[str, list[Asked]] = {name: [] for name in deployments}
    with _engine(options.engine) as engine:
        for _ in range(options.rounds):
            for name, flags in deployments.items():
                with served(*engine, *_COMMON, *flags, spare_processes=0) as server:

                    async def work(chats: Chats) -> Asked:
                        return await chats.converse(load)

                    runs[name].append(asyncio.run(chatting(server, work)))
    figures, problems = judge(runs)
    shorter = replace(load, groups=max(load.groups // _SHORTER, 2), turns=max(load.turns // 2, 2))
    few = max(blocks // _SHORTER // 2, 100)
    if options.engine == "paged":
        for more, wrong in (
            share_host(shorter, few, f"{_TIER_FACTOR}x"),
            restart(shorter, few, "1x", 4 * _TIER_FACTOR),
        ):
            figures |= more
            problems += wrong
    return BenchReport(
        name="kv-offload",
        config={
            "engine": options.engine, "users": options.users, "turns": options.turns, "kv_blocks": blocks, "host": tier,
            "concurrency": options.concurrency, "rounds": options.rounds, "quick": options.quick,
        },
        figures=figures,
        samples={f"ttft_mean_ms_{name}": [_mean_ttft_ms(one) for one in each] for name, each in runs.items()},
        problems=problems,
    )  # fmt: skip


@contextlib.contextmanager
def _engine(name: str) -> Iterator[Sequence[str]]:
    """Give the flags of an engine; of vLLM with a random model of 5 million parameters."""
    if name == "paged":
        yield _PAGED
        return
    from tests.support.checkpoints import make_checkpoint  # noqa: PLC0415 - its packages are an extra

    os.environ.update(_VLLM_CPU)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as directory:
        yield str(make_checkpoint(Path(directory) / "llama-5m", "llama", **SIZES)), *_VLLM


def judge(runs: dict[str, list[Asked]]) -> tuple[dict[str, float], list[str]]:
    """Compute the figures, and list what is not as it must be."""
    figures: dict[str, float] = {}
    for name, each in runs.items():
        figures[f"ttft_mean_ms_{name}"] = statistics.median(_mean_ttft_ms(one) for one in each)
        figures[f"itl_p99_ms_{name}"] = statistics.median(_itl_p99_ms(one.answers) for one in each)
        figures[f"cached_share_{name}"] = statistics.median(
            one.total("cached_tokens") / one.total("prompt_tokens") for one in each
        )
        figures[f"seconds_{name}"] = statistics.median(one.duration_s for one in each)
    figures["ttft_less_with_host"] = 1 - figures[f"ttft_mean_ms_{_HOST}"] / figures[f"ttft_mean_ms_{_NONE}"]
    figures["ttft_host_over_all_on_device"] = (
        figures[f"ttft_mean_ms_{_HOST}"] / figures[f"ttft_mean_ms_{_DEVICE}"]
    )
    figures["itl_p99_ratio_with_host"] = figures[f"itl_p99_ms_{_HOST}"] / figures[f"itl_p99_ms_{_NONE}"]
    texts = [sorted(answer.text for answer in one.answers) for each in runs.values() for one in each]
    equal = min(_equal_share(texts[0], other) for other in texts)
    figures["equal_answers_share"] = equal
    problems = []
    if equal < 1:
        problems.append(f"{equal:.1%} of the answers are equal, expected all")
    if figures["ttft_less_with_host"] < _LESS_TTFT_WANTED:
        problems.append(
            f"TTFT is {figures['ttft_less_with_host']:.0%} lower with the host tier, expected {_LESS_TTFT_WANTED:.0%}"
        )
    if figures["ttft_host_over_all_on_device"] > _OVER_DEVICE_MAX:
        problems.append(
            f"TTFT with the host tier is {figures['ttft_host_over_all_on_device']:.2f} of that with its bytes on the device, expected"
            f" at most {_OVER_DEVICE_MAX}"
        )
    if figures["itl_p99_ratio_with_host"] > _ITL_RATIO_MAX:
        problems.append(
            f"ITL p99 is {figures['itl_p99_ratio_with_host']:.2f} of that without the host tier, expected at most {_ITL_RATIO_MAX}"
        )
    return figures, problems


def _mean_ttft_ms(asked: Asked) -> float:
    return statistics.fmean(answer.ttft_s for answer in asked.answers) * 1e3


def _itl_p99_ms(answers: Sequence[Answer]) -> float:
    gaps = sorted(gap for answer in answers for gap in answer.gaps_s)
    return gaps[int(0.99 * (len(gaps) - 1))] * 1e3 if gaps else 0.0


def _equal_share(texts: Sequence[str], others: Sequence[str]) -> float:
    missing = list(others)
    equal = 0
    for text in texts:
        if text in missing:
            missing.remove(text)
            equal += 1
    return equal / max(len(texts), 1)
