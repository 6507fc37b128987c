"""Chooses the data-parallel rank of a request. Routers see one worker, but each of its ranks has its own prefix cache."""

from collections.abc import Collection

from penstock.core.types.requests import Request
from penstock.core.wire import num_tokens, unpack_hashes
from penstock.engine.kv_events.ranks import RankedBlocks
from penstock.engine.vllm.requests import Running

_RUNNING_TOKENS = 16
"""Load of a running request in prompt tokens: a cached prefix of 1,000 tokens outweighs 60 running requests."""


class RankChoice:
    """Chooses the rank with the least work: its queued prompt tokens, its running requests, and the prompt tokens it has not cached."""

    def __init__(self, blocks: RankedBlocks, block_size: int) -> None:
        self._blocks = blocks
        self._block_size = block_size
        self._turn = 0

    def choose(self, request: Request, running: Collection[Running]) -> tuple[int, int | None]:
        """Choose a rank for a request.

        Args:
            request: to be submitted.
            running: requests that were submitted and have not ended.

        Returns:
            the rank, and how many tokens of the prompt it has cached; None with one rank, since the router knows that number.
        """
        count = self._blocks.num_ranks
        if count == 1:
            return 0, None
        busy = [0] * count
        for each in running:
            busy[each.rank] += each.missing + _RUNNING_TOKENS
        hashes = unpack_hashes(request.block_hashes)[::2].tolist()
        cached = [self._blocks.depth(rank, hashes) * self._block_size for rank in range(count)]
        in_turn = [(self._turn + step) % count for step in range(count)]
        chosen = min(in_turn, key=lambda rank: busy[rank] + num_tokens(request.token_ids) - cached[rank])
        self._turn = chosen + 1
        return chosen, cached[chosen]
