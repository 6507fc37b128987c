"""Two served paged workers with and without loads from each other's devices: conversations that move, and a hot document.

Conversations go on one turn at a time. By round robin about half of the turns go to the worker that has not had the one before;
by policy `kv` few do. The document is asked about once, and then by several at a time. Nothing is configured of the links: workers
measure each other. By `tcp` the workers read over loopback sockets as if they were on two hosts, else by shared memory.
"""

import argparse
import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp

from benchmarks.processes.chats import Answer, Chats, Conversations, chatting
from benchmarks.processes.served import Served, served
from benchmarks.runner import expect_at_least
from penstock.bench.prompts import text
from penstock.bench.report import Report
from penstock.deploy.state import load_admin_token

_COMMON = (
    "--demo", "--workers", "2", "--log-level", "error", "--set", "roles.aggregated.weight_dtype=float32",
)  # fmt: skip
"""float32: in bfloat16 a cached prefix changes the rounding, and with it an answer now and then."""
_PEERS = ("--set", "worker.kv_transfer.peers=true")
_TCP = (
    "--set", "worker.kv_transfer.transfer.listen=[tcp://127.0.0.1:0]",
    "--set", "worker.kv_transfer.transfer.transports=[tcp]",
)  # fmt: skip
DEPLOYMENTS = {
    "in_turn_off": ("round-robin", ()),
    "in_turn_on": ("round-robin", _PEERS),
    "in_turn_tcp": ("round-robin", (*_PEERS, *_TCP)),
    "kv_off": ("kv", ()),
    "kv_on": ("kv", _PEERS),
}
LOADS = ("talks", "document")
_SLOWER_MAX = 1.05
_QUICK = {"talks": 3, "turns": 2, "questions": 4, "words": 200, "passes": 1}
_TOLD_S = 0.5


@dataclass(frozen=True, slots=True)
class Pair:
    """What one deployment came to.

    Attributes:
        answers: by load.
        peer_tokens: prompt tokens that the two workers have loaded from each other.
        peer_failures: loads that brought less than they were to.
    """

    answers: dict[str, list[Answer]]
    peer_tokens: int
    peer_failures: int

    def ttft_ms(self, load: str) -> float:
        """Mean over the requests of a load."""
        return 1e3 * statistics.fmean(answer.ttft_s for answer in self.answers[load])

    def cached_share(self, load: str) -> float:
        """Share of a load's prompt tokens."""
        answers = self.answers[load]
        return sum(one.cached_tokens for one in answers) / sum(one.prompt_tokens for one in answers)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--talks", type=int, default=7, metavar="N", help="conversations (default 7)")
    add("--turns", type=int, default=4, metavar="N", help="of each (default 4)")
    add("--questions", type=int, default=16, metavar="N", help="about the document, 4 at a time (default 16)")
    add(
        "--words",
        type=int,
        default=1000,
        metavar="N",
        help="of the document, and twice a first turn (default 1000)",
    )
    add("--policy", choices=("round-robin", "kv"), help="of deployments (default both)")
    add("--passes", type=int, default=1, metavar="N", help="of all deployments (default 1)")


def run(options: argparse.Namespace) -> Report:
    """Put the same loads on each deployment.

    Raises:
        ConfigError: an option makes no sense.
        Unavailable: a deployment does not start.
    """
    if options.quick:
        for name, value in _QUICK.items():
            setattr(options, name, value)
    expect_at_least(options, talks=1, turns=1, questions=1, words=2, passes=1)
    talks = Conversations(
        groups=options.talks, conversations_per_group=1, turns=options.turns, system_words=options.words // 2,
        turn_words=options.words // 16 + 1, answer_tokens=8, concurrency=1,
    )  # fmt: skip
    names = [name for name, (policy, _) in DEPLOYMENTS.items() if options.policy in {None, policy}]
    runs: dict[str, list[Pair]] = {name: [] for name in names}
    for number in range(options.passes):
        for name in names if number % 2 == 0 else reversed(names):
            policy, flags = DEPLOYMENTS[name]
            runs[name].append(_serve(("--policy", policy, *flags), talks, options.questions, options.words))
    figures, problems = judge(runs)
    return Report(
        name="kv-peers",
        config={
            "talks": options.talks, "turns": options.turns, "questions": options.questions, "words": options.words,
            "policy": options.policy, "passes": options.passes, "quick": options.quick,
        },
        figures=figures,
        samples={
            f"ttft_ms_{load}_{name}": [1e3 * answer.ttft_s for one in each for answer in one.answers[load]]
            for name, each in runs.items()
            for load in LOADS
        },
        problems=problems,
    )  # fmt: skip


def judge(runs: dict[str, list[Pair]]) -> tuple[dict[str, float], list[str]]:
    """Compute the figures, and list what is not as it must be."""
    figures: dict[str, float] = {}
    problems = []
    for name, each in runs.items():
        for load in LOADS:
            figures[f"ttft_mean_ms_{load}_{name}"] = statistics.fmean(one.ttft_ms(load) for one in each)
            figures[f"cached_share_{load}_{name}"] = statistics.fmean(one.cached_share(load) for one in each)
        figures[f"peer_tokens_{name}"] = statistics.fmean(one.peer_tokens for one in each)
        figures[f"peer_failures_{name}"] = statistics.fmean(one.peer_failures for one in each)
    for name in runs:
        policy, _, kind = name.rpartition("_")
        for load in LOADS if kind != "off" else ():
            ratio = figures[f"ttft_mean_ms_{load}_{name}"] / figures[f"ttft_mean_ms_{load}_{policy}_off"]
            figures[f"ttft_ratio_{load}_{name}"] = ratio
            if ratio > _SLOWER_MAX:
                problems.append(
                    f"TTFT of {load} at {name} is {ratio:.2f} of that without, expected at most {_SLOWER_MAX}"
                )
        if kind != "off" and policy == "in_turn" and not figures[f"peer_tokens_{name}"]:
            problems.append(f"{name}: nothing was loaded from the other worker")
    texts = [
        sorted(answer.text for load in LOADS for answer in one.answers[load])
        for each in runs.values()
        for one in each
    ]
    pairs = [(first, other) for one in texts for first, other in zip(texts[0], one, strict=True)]
    figures["equal_answers_share"] = sum(first == other for first, other in pairs) / len(pairs)
    if figures["equal_answers_share"] < 1:
        problems.append(f"{figures['equal_answers_share']:.1%} of the answers are equal, expected all")
    return figures, problems


def _serve(flags: Sequence[str], talks: Conversations, questions: int, words: int) -> Pair:
    with served(*_COMMON, *flags) as server:

        async def work(chats: Chats) -> Pair:
            return await _ask(server, chats, talks, questions, words)

        pair: Pair = asyncio.run(chatting(server, work))
        return pair


async def _ask(server: Served, chats: Chats, talks: Conversations, questions: int, words: int) -> Pair:
    for number in range(4):  # what a first request costs each worker
        await _about(chats, f"warm up {number}", 0)
    answers = {"talks": (await chats.converse(talks)).answers}
    document = text("document", words)
    await _about(chats, document, -1)
    await asyncio.sleep(_TOLD_S)  # routers learn who has it
    free = asyncio.Semaphore(4)

    async def one(number: int) -> Answer:
        async with free:
            return await _about(chats, document, number)

    answers["document"] = await asyncio.gather(*(one(number) for number in range(questions)))
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {load_admin_token()}"}) as http:
        await asyncio.sleep(_TOLD_S)
        async with http.get(f"{server.url}/admin/workers") as response:
            loads = [worker["load"] or {} for worker in (await response.json())["workers"]]
    return Pair(
        answers,
        peer_tokens=sum(load.get("peer_tokens", 0) for load in loads),
        peer_failures=sum(load.get("peer_failures", 0) for load in loads),
    )


async def _about(chats: Chats, document: str, number: int) -> Answer:
    asked = f"{document}\nquestion {number}"
    return await chats.ask([{"role": "user", "content": asked}], 8)
