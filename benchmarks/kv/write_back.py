"""Blocks that are written to a tier as their request leaves, and before the device evicts them: bytes written, hits and TTFT.

Conversations with a served `paged` engine, of three kinds: all KV fits on the device; prompts that never come back; and histories
of several times the device that come back after turns of all others. Modes take turns; figures are medians over the rounds.
"""

import argparse
import asyncio
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import aiohttp

from benchmarks.processes.chats import Asked, Chats, Conversations, chatting
from benchmarks.processes.served import Served, served
from penstock.bench.report import Report
from penstock.core.errors import ConfigError
from penstock.deploy.state import load_admin_token
from penstock.seams.kv import OffloadMode

_COMMON = (
    "--demo",
    "--workers",
    "1",
    "--log-level",
    "error",
    "--set",
    "roles.aggregated.weight_dtype=float32",
)
_STILL_S = 1.0
"""After so long without a copy all are over."""
_WRITTEN, _DROPPED, _CACHED, _TTFT = "written_mb", "dropped_blocks", "cached_share", "ttft_mean_ms"


@dataclass(frozen=True, slots=True)
class _Kind:
    """Traffic, blocks of the device, and a tier; PATH stands for a new file."""

    users: int
    turns: int
    kv_blocks: int
    tier: tuple[str, str]


_HOST, _DISK = ("--kv-host", "1x"), ("--kv-disk", "PATH:4x")
_KINDS = {
    "fits, disk": _Kind(24, 4, 1400, _DISK),
    "never back, disk": _Kind(120, 1, 300, _DISK),
    "comes back, disk": _Kind(24, 4, 300, _DISK),
    "comes back, host as large as the device": _Kind(24, 4, 300, _HOST),
}
_QUICK = {"fits, disk": _Kind(4, 2, 400, _DISK), "comes back, disk": _Kind(8, 2, 64, _DISK)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rounds", type=int, default=3, metavar="N", help="of all modes (default %(default)s)"
    )


def run(options: argparse.Namespace) -> Report:
    """Hold the same conversations in both modes.

    Raises:
        ConfigError: an option makes no sense.
        Unavailable: a deployment does not start.
    """
    if options.rounds < 1:
        raise ConfigError(f"--rounds: must be >= 1, got {options.rounds}")
    rounds, kinds = (1, _QUICK) if options.quick else (options.rounds, _KINDS)
    samples: dict[str, list[float]] = {}
    texts: dict[str, set[tuple[str, ...]]] = {}
    for _ in range(rounds):
        for name, kind in kinds.items():
            for mode in OffloadMode:
                figures, answers = _measure(kind, mode)
                texts.setdefault(name, set()).add(answers)
                for figure, value in figures.items():
                    samples.setdefault(f"{figure} {name} {mode}", []).append(value)
    problems = [f"{name}: answers differ" for name, each in texts.items() if len(each) > 1]
    figures = {name: statistics.median(each) for name, each in samples.items()}
    return Report(
        name="kv-write-back",
        config={
            "rounds": rounds,
            "quick": options.quick,
            "kinds": {
                name: f"{kind.users} users, {kind.turns} turns, {kind.kv_blocks} blocks, {' '.join(kind.tier)}"
                for name, kind in kinds.items()
            },
        },
        figures=figures,
        samples=samples,
        problems=problems + judge(figures, kinds),
    )


def judge(figures: Mapping[str, float], kinds: Mapping[str, object]) -> list[str]:
    """List where write-back writes more than write-through."""
    through, back = OffloadMode
    return [
        f"{name}: write-back writes {more:.1f} MB, write-through {less:.1f}"
        for name in kinds
        if (more := figures[f"{_WRITTEN} {name} {back}"]) > (less := figures[f"{_WRITTEN} {name} {through}"])
    ]


def _measure(kind: _Kind, mode: OffloadMode) -> tuple[dict[str, float], tuple[str, ...]]:
    load = Conversations(
        groups=kind.users, conversations_per_group=1, turns=kind.turns, system_words=60, turn_words=50,
        answer_tokens=24, concurrency=4,
    )  # fmt: skip

    with tempfile.TemporaryDirectory(prefix="kv-") as directory:
        flag, size = kind.tier
        flags = (
            flag, size.replace("PATH", f"{directory}/slots"), "--set", f"roles.aggregated.kv.offload={mode}", "--set",
            f"roles.aggregated.kv_blocks={kind.kv_blocks}",
        )  # fmt: skip
        with served(*_COMMON, *flags) as server:

            async def work(chats: Chats) -> tuple[Asked, dict[str, float]]:
                return await chats.converse(load), await _settled(server)

            asked, tier = asyncio.run(chatting(server, work))
    prompts = asked.total("prompt_tokens")
    figures = {
        _WRITTEN: tier["offloaded_blocks"] * tier["block_bytes"] / 1e6,
        _DROPPED: tier["dropped_blocks"],
        _CACHED: asked.total("cached_tokens") / prompts,
        "tier_share": tier["hit_tokens"] / prompts,
        _TTFT: statistics.fmean(answer.ttft_s for answer in asked.answers) * 1e3,
    }
    return figures, _texts(asked)


def _texts(asked: Asked) -> tuple[str, ...]:
    by_turn = {(answer.talk, answer.turn): answer.text for answer in asked.answers}
    return tuple(by_turn[key] for key in sorted(by_turn))


async def _settled(server: Served) -> dict[str, float]:
    """Give the counts of the worker's tier once no copy is under way."""
    headers = {"Authorization": f"Bearer {load_admin_token()}"}
    before: dict[str, float] = {}
    async with aiohttp.ClientSession(headers=headers) as http:
        while True:
            async with http.get(f"{server.url}/admin/workers") as response:
                workers: Sequence[dict[str, dict[str, list[dict[str, float]]]]] = (await response.json())[
                    "workers"
                ]
            (tier,) = workers[0]["load"]["kv_tiers"]
            if tier == before:
                return tier
            before = tier
            await asyncio.sleep(_STILL_S)
