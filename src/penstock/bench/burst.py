"""Compares a burst of requests on new connections with the same burst on open connections, beside a steady load.

A server that accepts slowly while it streams has a higher TTFT on new connections only.
"""

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from penstock.bench.client import Client
from penstock.bench.exchange import Exchange
from penstock.core.errors import Unavailable
from penstock.deploy.messages import cause_of

_ROUNDS, _QUICK_ROUNDS = 3, 1
_SETTLE_S = 1.0  # seconds of load before each burst

MakeClient = Callable[[], Client]
MakeBody = Callable[[int], bytes]


async def measure_burst(
    make_client: MakeClient, make_body: MakeBody, *, size: int, concurrency: int, quick: bool
) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Measure bursts beside a closed-loop load.

    Args:
        make_client: makes a client without connections.
        make_body: makes the body of request number n.
        size: requests in a burst, all sent at once.
        concurrency: concurrent requests of the load.
        quick: one burst of each kind instead of three.

    Returns:
        (figures, TTFT samples in seconds).

    Raises:
        Unavailable: a request of a burst failed.
    """
    numbers = itertools.count()
    seconds: dict[str, list[float]] = {"standing_ttft_s": [], "burst_ttft_s": []}
    load, idle = make_client(), make_client()

    async def keep_busy() -> None:
        while True:
            await load.send(make_body(next(numbers)))

    async def burst(client: Client) -> list[Exchange]:
        return await asyncio.gather(*(client.send(make_body(next(numbers))) for _ in range(size)))

    try:
        async with asyncio.TaskGroup() as group:
            await burst(idle)  # opens the connections
            busy = [group.create_task(keep_busy()) for _ in range(concurrency)]
            for _ in range(_QUICK_ROUNDS if quick else _ROUNDS):
                await asyncio.sleep(_SETTLE_S)
                seconds["standing_ttft_s"] += _ttfts(await burst(idle))
                await asyncio.sleep(_SETTLE_S)
                new = make_client()
                try:
                    seconds["burst_ttft_s"] += _ttfts(await burst(new))
                finally:
                    new.close()
            for task in busy:
                task.cancel()
    except BaseExceptionGroup as errors:
        raise cause_of(errors) from None
    finally:
        load.close()
        idle.close()
    return _figures(seconds), seconds


def _ttfts(exchanges: list[Exchange]) -> list[float]:
    failed = [exchange for exchange in exchanges if exchange.failure is not None]
    if failed:
        raise Unavailable(
            f"--burst: {len(failed)} of {len(exchanges)} requests failed: {failed[0].failure}: {failed[0].message}"
        )
    return [exchange.first_token_s - exchange.due_s for exchange in exchanges if exchange.first_token_s]


def _figures(seconds: dict[str, list[float]]) -> dict[str, float]:
    figures: dict[str, Any] = {}
    for name, values in seconds.items():
        kind = name.removesuffix("_s")
        for percent in (50, 99):
            figures[f"{kind}_ms_p{percent}"] = float(np.percentile(values, percent)) * 1e3
    figures["burst_over_standing_ttft_p99"] = figures["burst_ttft_ms_p99"] / figures["standing_ttft_ms_p99"]
    return figures
