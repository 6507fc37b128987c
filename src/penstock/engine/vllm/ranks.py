"""Which data-parallel rank of vLLM gets a request: routers see one worker, and its ranks have caches of their own."""

from collections.abc import Collection

from penstock.core.types.requests import Request
from penstock.core.wire import num_tokens, unpack_hashes
from penstock.engine.kv_events.ranks import RankedBlocks
from penstock.engine.vllm.requests import Running

_RUNNING_TOKENS = 16
"""A running request keeps a rank as busy as so many prompt tokens: a prefix of 1,000 tokens outweighs 60 requests."""


class RankChoice:
    """Sends a request to the rank that has most of its prompt, unless it is busier by more than others would have to compute."""

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
            the rank, and how many tokens of the prompt it has; None where there is one rank, which the router knows as well.
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
