"""Blocks with the tokens past a prompt's full blocks, on their way from one engine to another: each is for one request.

They have no hash, so that no cache can give them. One that was kept of a request that ended is let go when the next step
begins, unless somebody has claimed it; one that was lent to a request that waits is let go when others need the room, and
its tokens are computed like any others.
"""

from penstock.core.ids import BlockId, RequestId
from penstock.kv.pool.pins import Pins


class PartialBlocks:
    """One scheduler's; it holds its blocks as pins. Not thread-safe."""

    def __init__(self, pins: Pins) -> None:
        """Keep nothing, lend nothing."""
        self.keeps_any = True
        """Whether the engine hands any over."""
        self._pins = pins
        self._kept: dict[RequestId, BlockId] = {}
        self._lent: dict[RequestId, tuple[BlockId, int]] = {}

    def keep(self, request_id: RequestId, block_id: BlockId) -> None:
        """Hold the last block of a request that ends, for who claims it before the next step begins."""
        if self.keeps_any:
            self._pins.hold([block_id])
            self._kept[request_id] = block_id

    def claim(self, request_id: RequestId) -> BlockId | None:
        """Give a kept block to the caller, who holds it from now on."""
        return self._kept.pop(request_id, None)

    def forget_kept(self) -> None:
        """Let go of what nobody has claimed."""
        if self._kept:
            self._pins.unpin(list(self._kept.values()))
            self._kept.clear()

    def lend(self, request_id: RequestId, block_id: BlockId, num_tokens: int) -> None:
        """Hold a block, as the caller did until now, for a request that waits; its first `num_tokens` places are computed."""
        self.give_back(request_id)
        if num_tokens > 0:
            self._lent[request_id] = block_id, num_tokens
        else:
            self._pins.unpin([block_id])

    def tokens_of(self, request_id: RequestId) -> int:
        """Count the tokens in the block that was lent to a request; 0 where there is none."""
        lent = self._lent.get(request_id)
        return 0 if lent is None else lent[1]

    def take(self, request_id: RequestId) -> BlockId:
        """Hand the lent block over to the request's sequence, which holds it from now on."""
        block_id, _ = self._lent.pop(request_id)
        self._pins.pass_on([block_id])
        return block_id

    def give_back(self, request_id: RequestId) -> None:
        """Let go of what was lent to a request; no error where nothing was."""
        lent = self._lent.pop(request_id, None)
        if lent is not None:
            self._pins.unpin([lent[0]])

    def give_all_back(self) -> bool:
        """Let go of all that was lent: others need the room. Returns whether there was anything."""
        lent = tuple(self._lent)
        for request_id in lent:
            self.give_back(request_id)
        return bool(lent)

    def check(self, waiting: set[RequestId]) -> None:
        """Raise AssertionError where something is held for nobody, or was let go."""
        assert self._lent.keys() <= waiting, "a block was lent to a request that does not wait"
        held = self._pins.holders()
        for block_id in (*self._kept.values(), *(block_id for block_id, _ in self._lent.values())):
            assert held.get(block_id, 0) > 0, f"block {block_id} of a tail is not held"
