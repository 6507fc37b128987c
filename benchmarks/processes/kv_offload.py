"""Conversations of more KV than the device holds, on a served paged engine: without a host tier, and with one.

Every user's turn comes after a turn of all others, so that without a host tier most histories are evicted when they are
needed. The third deployment has the host tier's bytes as device blocks: on a CPU that is the same memory, and the least
that any tier could take. Deployments take turns; figures are medians over the rounds.
"""

import argparse
import asyncio
import statistics
from collections.abc import Sequence

from benchmarks.processes.chats import Answer, Asked, Chats, Conversations, chatting
from benchmarks.processes.served import served
from penstock.bench.report import Report
from penstock.core.errors import ConfigError

_COMMON = (
    "--demo",
    "--workers",
    "1",
    "--log-level",
    "error",
    "--set",
    "roles.aggregated.weight_dtype=float32",
)
"""float32: in bfloat16 a cached prefix changes the rounding, and with it an answer now and then."""
_LESS_TTFT_WANTED = 0.5
_ITL_RATIO_MAX = 1.1
_TIER_FACTOR = 4
"""Blocks of the host tier for each of the device."""
_QUICK = {"users": 24, "turns": 4, "kv_blocks": 220, "rounds": 1}
_NONE, _HOST, _DEVICE = "device", "host", "all_on_device"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--users", type=int, default=80, metavar="N", help="conversations (default 80)")
    parser.add_argument(
        "--turns", type=int, default=10, metavar="N", help="of each conversation (default 10)"
    )
    parser.add_argument(
        "--kv-blocks",
        type=int,
        default=2000,
        metavar="N",
        help="on the device (default 2000, about a quarter of all KV)",
    )
    parser.add_argument(
        "--concurrency", type=int, default=4, metavar="N", help="requests at a time (default 4)"
    )
    parser.add_argument("--rounds", type=int, default=2, metavar="N", help="of all deployments (default 2)")


def run(options: argparse.Namespace) -> Report:
    """Hold the same conversations with each deployment.

    Raises:
        ConfigError: an option makes no sense.
        Unavailable: a deployment does not start.
    """
    if options.quick:
        for name, value in _QUICK.items():
            setattr(options, name, value)
    for name in ("users", "turns", "kv_blocks", "concurrency", "rounds"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')}: must be >= 1, got {getattr(options, name)}")
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
    for _ in range(options.rounds):
        for name, flags in deployments.items():
            with served(*_COMMON, *flags, spare_processes=0) as server:

                async def work(chats: Chats) -> Asked:
                    return await chats.converse(load)

                runs[name].append(asyncio.run(chatting(server, work)))
    figures, problems = judge(runs)
    return Report(
        name="kv-offload",
        config={
            "users": options.users, "turns": options.turns, "kv_blocks": blocks, "host": tier,
            "concurrency": options.concurrency, "rounds": options.rounds, "quick": options.quick,
        },
        figures=figures,
        samples={f"ttft_mean_ms_{name}": [_mean_ttft_ms(one) for one in each] for name, each in runs.items()},
        problems=problems,
    )  # fmt: skip


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
