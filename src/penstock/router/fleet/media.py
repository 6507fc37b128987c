"""Has workers expand prompts with images and the like."""

import asyncio
import hashlib
from collections.abc import Iterable

from penstock.core.errors import Overloaded, Unavailable
from penstock.core.log import get_logger
from penstock.core.types.instances import ModelCard
from penstock.core.types.requests import ExpandedPrompt, MediaPrompt
from penstock.router.workers.member import Condition, FleetMember

EXPAND_TIMEOUT_S = 60.0
WORKERS_MAX = 3
"""Workers that are asked about one prompt."""
_READY = (Condition.READY, Condition.PREFILL_ONLY)

_log = get_logger()


async def expand_media(
    card: ModelCard, prompt: MediaPrompt, members: Iterable[FleetMember]
) -> ExpandedPrompt:
    """Have a worker's engine expand the media of a prompt.

    The same media go to the same worker, as long as it is there, since engines keep what they have decoded.

    Args:
        card: of the model, or of an adapter.
        prompt: with one placeholder for each item.
        members: all workers.

    Raises:
        RequestError: the engine does not take these media.
        Unavailable: no worker answered.
    """
    name = card.parent or card.name
    asked = [member for member in members if member.condition in _READY and member.instance.card.name == name]
    asked.sort(key=lambda member: _weight(prompt, member))
    problem: Exception | None = None
    for member in asked[:WORKERS_MAX]:
        if member.connection is None:
            continue  # lost meanwhile
        try:
            async with asyncio.timeout(EXPAND_TIMEOUT_S):
                return await member.connection.expand_media(prompt)
        except (Unavailable, Overloaded, TimeoutError) as error:
            problem = error
            _log.warning("media_expansion_failed", worker=member.instance.name, error=str(error))
    why = f": {problem or 'no answer in time'}" if asked else ""
    raise Unavailable(
        f"model {card.name}: none of {min(len(asked), WORKERS_MAX)} workers could read the request's media now{why}; send it"
        " again",
        retry_after_s=1.0,
    ) from problem


def _weight(prompt: MediaPrompt, member: FleetMember) -> bytes:
    """Order workers by a hash of worker and first item: a worker that leaves moves only its own items."""
    name = member.worker_id.to_bytes(8, "little", signed=False)
    return hashlib.blake2b(prompt.items[0].digest, key=name, digest_size=8).digest()
