"""Two vLLM workers behind the router: prefix hits by policy, and streams whose worker is killed.

Prefix hits are measured with two loads. The KV blocks of one worker hold 0.6 of the larger load: two workers have room for
all conversations if each stays with one worker. The other load, whose conversations share system prompts, fits nearly
into each worker, so that round-robin finds most prefixes too. Each vLLM takes the better part of a minute to start,
with `--quick` as well.
"""

import argparse
import asyncio
import dataclasses
import statistics
from collections.abc import Iterator
from functools import partial

import psutil

from benchmarks.processes.chats import Answer, Asked, Chats, Conversations, chatting
from benchmarks.vllm.servers import BLOCK, CONTEXT, checkpoint, described, penstock
from penstock.bench.load import text
from penstock.bench.report import BenchReport
from penstock.core.errors import Unavailable

_STREAMS, _STREAM_TOKENS, _KILL_AT_PIECE = 8, 160, 20
_LARGER = Conversations(
    groups=54,
    conversations_per_group=1,
    turns=6,
    system_words=8,
    turn_words=32,
    answer_tokens=16,
    concurrency=6,
    seed=1,
)
"""54 conversations with nothing in common."""
_FITTING = Conversations(
    groups=6,
    conversations_per_group=6,
    turns=6,
    system_words=96,
    turn_words=32,
    answer_tokens=16,
    concurrency=6,
    seed=2,
)
"""36 conversations in six groups, each with a system prompt of its own."""
_TURN_TOKENS = 217
"""Tokens of a turn and its answer, as counted by the servers."""
_WORD_TOKENS = 4.4  # of these prompts, by the tokenizer of the checkpoint
_ROOM = 0.6
"""KV blocks of one worker, as a share of what all conversations of the larger load take at their end."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0, help="of weights (default 0)")


def run(options: argparse.Namespace) -> BenchReport:
    """Measure hits and the killed worker.

    Raises:
        ConfigError: vLLM or the packages for its checkpoint are not installed.
    """
    loads = {"larger": _LARGER, "fitting": _FITTING}
    if options.quick:
        loads = {
            name: dataclasses.replace(load, groups=4, conversations_per_group=2, turns=2)
            for name, load in loads.items()
        }
    blocks = _blocks(loads["larger"])
    held: dict[str, Asked] = {}
    with checkpoint(options.seed) as model:
        for policy in ("kv", "round-robin"):
            name = policy.replace("-", "_")
            with penstock(model, blocks, workers=2, policy=policy) as deployment:
                for kind, load in loads.items():
                    work = partial(Chats.converse, load=load)
                    held[f"{name}_{kind}"] = asyncio.run(chatting(deployment, work))
                if policy == "kv":
                    streams = asyncio.run(chatting(deployment, _kill_midstream))
    figures = _hit_figures(held) | streams
    return BenchReport(
        name="vllm",
        config=described(blocks)
        | {
            "conversations": {name: dataclasses.asdict(load) for name, load in loads.items()},
            "streams": _STREAMS,
            "seed": options.seed,
            "quick": options.quick,
        },
        samples={f"{name}_ttft_s": [one.ttft_s for one in asked.answers] for name, asked in held.items()},
        figures=figures,
        problems=[] if options.quick else list(_problems(figures)),
    )


def _blocks(load: Conversations) -> int:
    """Give each worker's KV blocks: `_ROOM` of what all conversations take, each group's system prompt once."""
    group = load.system_words * _WORD_TOKENS + load.conversations_per_group * load.turns * _TURN_TOKENS
    return max(round(_ROOM * load.groups * group / BLOCK), CONTEXT // BLOCK)


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
    for kind in ("larger", "fitting"):
        figures[f"{kind}_hit_tokens_kv_over_round_robin"] = figures[f"kv_{kind}_hit_tokens"] / max(
            figures[f"round_robin_{kind}_hit_tokens"], 1
        )
    return figures


def _problems(figures: dict[str, float]) -> Iterator[str]:
    if figures["killed_streams_exact"] < figures["killed_streams"]:
        yield f"{figures['killed_streams_exact']:g} of {_STREAMS} streams went on exactly after a worker was killed"
