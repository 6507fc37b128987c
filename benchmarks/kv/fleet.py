"""Workers that share an object store and nothing else, on a served paged engine: without the store, and with it over slow links.

Each prompt is asked once of each worker, in rounds: round robin, shifted by one worker from round to round. So no worker has
a prompt of a later round on its device, and whatever is cached there, another worker stored. Links are as fast, relative to
what pays (KV bytes per token x prompt tokens per second, measured without the store), as the named GB/s are for Llama 70B,
whose long prompts take more seconds a token and so pay over slower links.
"""

import argparse
import asyncio
import os
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from benchmarks.kv.s3 import BUCKET, ENVIRONMENT, S3Server
from benchmarks.kv.slow_link import slow_link
from benchmarks.processes.chats import Answer, Chats, chatting
from benchmarks.processes.served import Served, served
from benchmarks.runner import expect_at_least
from penstock.bench.prompts import text
from penstock.bench.report import Report
from penstock.core.errors import ConfigError
from penstock.deploy.state import load_admin_token

_WORKERS = 4
_COMMON = (
    "--demo", "--workers", str(_WORKERS), "--policy", "round-robin", "--log-level", "error",
    "--set", "roles.aggregated.weight_dtype=float32",
)  # fmt: skip
"""float32: in bfloat16 a cached prefix changes the rounding, and with it an answer now and then."""
SHORT_PAYS_GB_PER_S = 2.3
"""What pays for Llama 70B, weights and KV in fp8, on two H100 with prompts of 4,096 tokens: 164 kB of KV a token, 71 us to compute one."""
LONG_PAYS_GB_PER_S = 0.55
"""The same on one H200 with prompts of 98,304 tokens: 297 us, by the roofline."""
LINKS = {
    "0.2_gb_per_s": (0.2, SHORT_PAYS_GB_PER_S),
    "1_gb_per_s": (1.0, SHORT_PAYS_GB_PER_S),
    "5_gb_per_s": (5.0, SHORT_PAYS_GB_PER_S),
    "1_gb_per_s_long": (1.0, LONG_PAYS_GB_PER_S),
}
"""GB/s of a link, and what pays there."""
_KV_BYTES_PER_TOKEN = 5 * 2 * 2 * 32 * 4
"""Of the demo model: layers, keys and values, heads, dimensions, bytes of a float32."""
_BLOCK_TOKENS = 16
_ROUNDS = _WORKERS  # each worker is asked each prompt once
_ANSWER_TOKENS = 4
_SLOWER_MAX = 1.05
_SETTLED_S = 3.0
_SETTLE_MAX_S = 45.0
_QUICK = {"prompts": 4, "words": 150, "passes": 1}
_NONE = "none"


@dataclass(frozen=True, slots=True)
class Fleet:
    """What one deployment came to.

    Attributes:
        rounds: (rounds,) answers to all prompts.
        block_bytes: of KV, 0 without the store.
        hit_tokens: prompt tokens found in the store by all workers.
        loaded_blocks: blocks loaded from the store by all workers.
        workers_with_hits: workers that found any.
    """

    rounds: tuple[tuple[Answer, ...], ...]
    block_bytes: int
    hit_tokens: int
    loaded_blocks: int
    workers_with_hits: int

    @property
    def ttft_ms(self) -> float:
        """Mean over all requests."""
        return 1e3 * statistics.fmean(answer.ttft_s for answers in self.rounds for answer in answers)

    @property
    def later_ttft_ms(self) -> float:
        """Mean over the rounds after the first, whose prompts another worker has computed."""
        return 1e3 * statistics.fmean(answer.ttft_s for answers in self.rounds[1:] for answer in answers)

    @property
    def texts(self) -> list[str]:
        """All answers, in order."""
        return [answer.text for answers in self.rounds for answer in answers]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prompts", type=int, default=8, metavar="N", help="asked of each worker (default 8)"
    )
    parser.add_argument("--words", type=int, default=1200, metavar="N", help="of a prompt (default 1200)")
    parser.add_argument("--passes", type=int, default=1, metavar="N", help="of all deployments (default 1)")


def run(options: argparse.Namespace) -> Report:
    """Ask the same prompts of each deployment.

    Raises:
        ConfigError: an option makes no sense.
        Unavailable: a deployment or the S3 server does not start.
    """
    if options.quick:
        for name, value in _QUICK.items():
            setattr(options, name, value)
    expect_at_least(options, prompts=1, words=1, passes=1)
    if options.prompts % _WORKERS:
        raise ConfigError(f"--prompts: must be a multiple of the {_WORKERS} workers, got {options.prompts}")
    prompts = [text(f"fleet {number}", options.words) for number in range(options.prompts)]
    runs: dict[str, list[Fleet]] = {name: [] for name in (_NONE, *LINKS)}
    pays = 0.0
    with s3_server() as s3:
        for number in range(options.passes):
            runs[_NONE].append(_serve((), prompts))
            tokens_per_s = _prompt_tokens_per_s(runs[_NONE][0])
            for name, (gb_per_s, pays_gb_per_s) in LINKS.items():
                pays = _KV_BYTES_PER_TOKEN * tokens_per_s
                rate = pays * gb_per_s / pays_gb_per_s
                with slow_link(s3.port, rate) as link:
                    prefix = f"s3://{BUCKET}/{number}-{name}"
                    runs[name].append(_serve(_store_flags(prefix, link), prompts))
            runs[_NONE].append(_serve((), prompts))
    figures, problems = judge(runs)
    figures["pays_bytes_per_s"] = pays
    return Report(
        name="kv-fleet",
        config={
            "workers": _WORKERS, "prompts": options.prompts, "words": options.words, "passes": options.passes,
            "links_gb_per_s_and_what_pays": LINKS, "quick": options.quick,
        },
        figures=figures,
        samples={
            f"ttft_ms_{name}": [1e3 * answer.ttft_s for one in each for answers in one.rounds for answer in answers]
            for name, each in runs.items()
        },
        problems=problems,
    )  # fmt: skip


def judge(runs: dict[str, list[Fleet]]) -> tuple[dict[str, float], list[str]]:
    """Compute the figures, and list what is not as it must be."""
    figures: dict[str, float] = {}
    for name, each in runs.items():
        figures[f"ttft_mean_ms_{name}"] = statistics.fmean(one.ttft_ms for one in each)
        figures[f"ttft_later_mean_ms_{name}"] = statistics.fmean(one.later_ttft_ms for one in each)
        figures[f"hit_tokens_{name}"] = statistics.fmean(one.hit_tokens for one in each)
        figures[f"loaded_blocks_{name}"] = statistics.fmean(one.loaded_blocks for one in each)
        figures[f"workers_with_hits_{name}"] = min(one.workers_with_hits for one in each)
    none = [one.ttft_ms for one in runs[_NONE]]
    figures["ttft_spread_none"] = max(none) / min(none)
    problems = []
    for name in [each for each in runs if each != _NONE]:
        ratio = figures[f"ttft_mean_ms_{name}"] / figures[f"ttft_mean_ms_{_NONE}"]
        figures[f"ttft_ratio_{name}"] = ratio
        if ratio > _SLOWER_MAX:
            problems.append(
                f"TTFT with the store at {name} is {ratio:.2f} of that without, expected at most {_SLOWER_MAX}"
            )
    for name, (gb_per_s, pays_gb_per_s) in LINKS.items():
        hits = figures[f"workers_with_hits_{name}"]
        if gb_per_s > pays_gb_per_s and hits < _WORKERS:
            problems.append(f"{hits:.0f} of {_WORKERS} workers found blocks of others at {name}, which pays")
    sizes = {one.block_bytes for name, each in runs.items() if name != _NONE for one in each}
    if sizes != {_KV_BYTES_PER_TOKEN * _BLOCK_TOKENS}:
        problems.append(f"blocks have {sizes} bytes, expected {_KV_BYTES_PER_TOKEN * _BLOCK_TOKENS}")
    texts = [one.texts for each in runs.values() for one in each]
    pairs = [(first, other) for one in texts for first, other in zip(texts[0], one, strict=True)]
    figures["equal_answers_share"] = sum(first == other for first, other in pairs) / len(pairs)
    if figures["equal_answers_share"] < 1:
        problems.append(f"{figures['equal_answers_share']:.1%} of the answers are equal, expected all")
    return figures, problems


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """Run an S3 server, with its credentials in the environment."""
    with ExitStack() as stack:
        before = {name: os.environ.get(name) for name in ENVIRONMENT}
        os.environ.update(ENVIRONMENT)
        for name, value in before.items():
            if value is None:
                stack.callback(os.environ.pop, name, None)
            else:
                stack.callback(os.environ.__setitem__, name, value)
        server = S3Server()
        stack.callback(server.kill)
        yield server


def _store_flags(url: str, link: str) -> tuple[str, ...]:
    fields = {"url": url, "refresh_s": "2", "pack_size": "1MiB", "options.endpoint": link}
    return tuple(
        part
        for name, value in fields.items()
        for part in ("--set", f"roles.aggregated.kv.object.{name}={value}")
    )


def _serve(flags: Sequence[str], prompts: Sequence[str]) -> Fleet:
    with served(*_COMMON, *flags) as server:

        async def work(chats: Chats) -> Fleet:
            return await _ask(server, chats, prompts, has_store=bool(flags))

        fleet: Fleet = asyncio.run(chatting(server, work))
        return fleet


async def _ask(server: Served, chats: Chats, prompts: Sequence[str], *, has_store: bool) -> Fleet:
    for number in range(_WORKERS):  # what a first request costs each worker
        await _one(chats, f"warm up {number}")
    rounds = []
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {load_admin_token()}"}) as http:
        for _ in range(_ROUNDS):
            rounds.append(tuple([await _one(chats, prompt) for prompt in prompts]))
            if has_store:
                await _settle(server, http)
            await _one(chats, "one more, so that each prompt goes to the next worker")
        tiers = [tier for tiers in (await _tiers(server, http)).values() for tier in tiers]
    return Fleet(
        tuple(rounds),
        block_bytes=max((tier["block_bytes"] for tier in tiers), default=0),
        hit_tokens=sum(tier["hit_tokens"] for tier in tiers),
        loaded_blocks=sum(tier["loaded_blocks"] for tier in tiers),
        workers_with_hits=sum(tier["loaded_blocks"] > 0 for tier in tiers),
    )


async def _one(chats: Chats, prompt: str) -> Answer:
    return await chats.ask([{"role": "user", "content": prompt}], _ANSWER_TOKENS)


async def _settle(server: Served, http: aiohttp.ClientSession) -> None:
    """Wait until all workers know the same blocks for a while, for `_SETTLE_MAX_S` at most."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + _SETTLE_MAX_S
    before: object = None
    since_s = loop.time()
    while loop.time() < min(end_s, since_s + _SETTLED_S) or before is None:
        counts = [tier["cached_blocks"] for tiers in (await _tiers(server, http)).values() for tier in tiers]
        if counts != before or len(set(counts)) != 1:
            before, since_s = counts, loop.time()
        await asyncio.sleep(0.1)
        if loop.time() > end_s:
            return


async def _tiers(server: Served, http: aiohttp.ClientSession) -> dict[str, list[dict[str, Any]]]:
    async with http.get(f"{server.url}/admin/workers") as response:
        workers = (await response.json())["workers"]
    return {worker["name"]: (worker["load"] or {}).get("kv_tiers") or [] for worker in workers}


def _prompt_tokens_per_s(fleet: Fleet) -> float:
    answers = [answer for answers in fleet.rounds for answer in answers]
    return sum(answer.prompt_tokens for answer in answers) / sum(answer.ttft_s for answer in answers)
