"""Fetches files of a model card from workers."""

import asyncio
import random
from collections.abc import Iterable

from penstock.core.errors import RequestError, Unavailable
from penstock.core.log import get_logger
from penstock.core.types.instances import CardFile, ModelCard
from penstock.router.workers.member import FleetMember

FETCH_TIMEOUT_S = 30.0

_log = get_logger()


async def fetch_file(
    card: ModelCard, file: CardFile, members: Iterable[FleetMember], rng: random.Random
) -> bytes:
    """Fetch a card's file from any member that has it.

    Args:
        card: of the model.
        file: one of its files.
        members: asked in random order, those that discovery lists no more at last.
        rng: for the order.

    Raises:
        Unavailable: no worker answered.
    """
    holders = [m for m in members if m.connection and file in m.instance.card.files]
    rng.shuffle(holders)
    holders.sort(key=lambda member: not member.listed)  # one whose lease ran out may be gone without a word
    problem: Exception | None = None
    for member in holders:
        if member.connection is None:
            continue  # lost meanwhile
        try:
            async with asyncio.timeout(FETCH_TIMEOUT_S):
                return await member.connection.fetch(file.sha256)
        except (Unavailable, RequestError, TimeoutError) as error:
            problem = error
            _log.warning("file_fetch_failed", file=file.name, worker=member.instance.name, error=str(error))
    raise Unavailable(
        f"model {card.name}: {file.name} could not be fetched from any of {len(holders)} connected workers that"
        f" list it; try again when one is back",
        retry_after_s=1.0,
    ) from problem
