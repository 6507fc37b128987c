"""What outlives a worker, or all of them: the arena that the workers of a host share, and disks across a SIGKILL of everything."""

import asyncio
import contextlib
import copy
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace

import aiohttp

from benchmarks.processes.chats import Answer, Asked, Chats, Conversations, Talks, chatting
from benchmarks.processes.served import served

_COMMON = ("--demo", "--log-level", "error", "--set", "roles.aggregated.weight_dtype=float32")
_HIT_RATIO_MIN = 0.9
"""Of the second half's share of cached tokens over the same without a restart."""
_MOVED_MAX = 0.7
"""Of the mean TTFT of turns whose history another worker computed, with the shared arena over without."""
_KILL_AFTER_S = 0.3


def share_host(load: Conversations, kv_blocks: int, tier: str) -> tuple[dict[str, float], list[str]]:
    """Hold conversations whose turns go to either of two workers of a host at random, without a host tier and with one.

    Args:
        load: the conversations.
        kv_blocks: on each device.
        tier: size of the host tier.

    Returns:
        figures, and what is not as it must be.
    """
    figures: dict[str, float] = {}
    texts = []
    load = replace(load, concurrency=2)  # one request for each worker
    for name, tiers in (("device", ()), ("host", ("--kv-host", tier))):
        flags = (
            *_COMMON, "--workers", "2", "--policy", "random", "--set", f"roles.aggregated.kv_blocks={kv_blocks}",
            "--set", "frontend.explains=true", *tiers,
        )  # fmt: skip
        with served(*flags) as server:

            async def work(chats: Chats) -> Asked:
                return await chats.converse(load)

            asked: Asked = asyncio.run(chatting(server, work, explains=True))
        moved = _moved(asked.answers)
        figures[f"moved_turns_{name}"] = len(moved)
        figures[f"moved_ttft_mean_ms_{name}"] = statistics.fmean(answer.ttft_s for answer in moved) * 1e3
        figures[f"moved_cached_share_{name}"] = _cached_share(moved)
        texts.append({(answer.talk, answer.turn): answer.text for answer in asked.answers})
    ratio = figures["moved_ttft_mean_ms_host"] / figures["moved_ttft_mean_ms_device"]
    figures["moved_ttft_with_host"] = ratio
    equal = sum(texts[0][key] == texts[1][key] for key in texts[0]) / len(texts[0])
    figures["moved_equal_answers_share"] = equal
    problems = [f"{equal:.1%} of the answers of two workers are equal, expected all"] if equal < 1 else []
    if ratio > _MOVED_MAX:
        problems.append(
            f"TTFT of turns whose history another worker computed is {ratio:.2f} of that without the arena, expected"
            f" {_MOVED_MAX}"
        )
    return figures, problems


def restart(
    load: Conversations, kv_blocks: int, host: str, disk_factor: int
) -> tuple[dict[str, float], list[str]]:
    """Hold the first half of conversations, end everything by SIGKILL, start again, and hold the second half; once more without a restart.

    Args:
        load: the conversations.
        kv_blocks: on the device.
        host: size of the host tier.
        disk_factor: blocks of the disk for each of the device.

    Returns:
        figures, and what is not as it must be.
    """
    half = load.turns // 2
    with _disks(kv_blocks, host, disk_factor) as flags, served(*flags) as server:

        async def undisturbed(chats: Chats) -> Asked:
            talks = load.begin()
            await chats.converse(load, talks, range(half))
            return await chats.converse(load, talks, range(half, load.turns))

        whole: Asked = asyncio.run(chatting(server, undisturbed))
    talks = load.begin()
    with _disks(kv_blocks, host, disk_factor) as flags:

        async def first(chats: Chats) -> Asked:
            asked = await chats.converse(load, talks, range(half))
            lost: Talks = copy.deepcopy(talks)  # the turn that is under way is asked again
            with contextlib.suppress(aiohttp.ClientError, asyncio.CancelledError):
                async with asyncio.TaskGroup() as group:
                    group.create_task(_interrupted(chats, load, lost, half))
                    await asyncio.sleep(_KILL_AFTER_S)
                    server.kill()
            return asked

        async def second(chats: Chats) -> Asked:
            return await chats.converse(load, talks, range(half, load.turns))

        with served(*flags) as server:
            before: Asked = asyncio.run(chatting(server, first))
        with served(*flags) as server:
            after: Asked = asyncio.run(chatting(server, second))
    figures = {
        "restart_cached_share_first_half": _cached_share(before.answers),
        "restart_cached_share_second_half": _cached_share(after.answers),
        "restart_cached_share_without": _cached_share(whole.answers),
        "restart_cached_share_first_turn": _cached_share([one for one in after.answers if one.turn == half]),
        "restart_ttft_mean_ms_first_half": _ttft_mean_ms(before.answers),
        "restart_ttft_mean_ms_second_half": _ttft_mean_ms(after.answers),
        "restart_ttft_mean_ms_without": _ttft_mean_ms(whole.answers),
    }
    ratio = figures["restart_cached_share_second_half"] / figures["restart_cached_share_without"]
    figures["restart_cached_share_ratio"] = ratio
    texts = [{(answer.talk, answer.turn): answer.text for answer in one.answers} for one in (whole, after)]
    equal = sum(texts[0][key] == texts[1].get(key) for key in texts[0]) / len(texts[0])
    figures["restart_equal_answers_share"] = equal
    problems = [f"{equal:.1%} of the answers after a restart are equal, expected all"] if equal < 1 else []
    if ratio < _HIT_RATIO_MIN:
        problems.append(
            f"the second half's hit ratio is {ratio:.2f} of that without a restart, expected {_HIT_RATIO_MIN}"
        )
    return figures, problems


@contextlib.contextmanager
def _disks(kv_blocks: int, host: str, disk_factor: int) -> Iterator[Sequence[str]]:
    """Give the flags of a deployment with a host tier, and a new disk tier in a directory of its own."""
    with tempfile.TemporaryDirectory(prefix="kv-") as directory:
        yield (
            *_COMMON, "--workers", "1", "--set", f"roles.aggregated.kv_blocks={kv_blocks}", "--kv-host", host,
            "--kv-disk", f"{directory}/slots:{disk_factor}x",
        )  # fmt: skip


async def _interrupted(chats: Chats, load: Conversations, talks: Talks, turn: int) -> None:
    with contextlib.suppress(aiohttp.ClientError):
        await chats.converse(load, talks, range(turn, turn + 1))


def _moved(answers: Sequence[Answer]) -> list[Answer]:
    """Return the answers that come from another worker than the turn before them."""
    workers = {(answer.talk, answer.turn): answer.worker for answer in answers}
    return [
        answer for answer in answers if answer.turn and workers[answer.talk, answer.turn - 1] != answer.worker
    ]


def _ttft_mean_ms(answers: Sequence[Answer]) -> float:
    return statistics.fmean(answer.ttft_s for answer in answers) * 1e3


def _cached_share(answers: Sequence[Answer]) -> float:
    return sum(answer.cached_tokens for answer in answers) / sum(answer.prompt_tokens for answer in answers)
