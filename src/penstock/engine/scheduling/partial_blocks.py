"""Partial blocks in KV transfers: the tokens after a prompt's full blocks, for one request only.

A partial block has no hash, so the prefix cache cannot hold it. On the prefill side, the last block of an ended request is
*kept* until the next step begins, unless the worker claims it. On the decode side, a received block is *lent* to a waiting
request; it is freed when other requests need the blocks, and its tokens are then computed.
"""

from penstock.core.ids import BlockId, RequestId
from penstock.kv.pool import Pins


class PartialBlocks:
    """The kept and lent blocks of one scheduler, held as pins. Not thread-safe."""

    def __init__(self, pins: Pins) -> None:
        self.keeps_any = True
        """Whether blocks of ended requests are kept; False in an engine without KV transfers."""
        self._pins = pins
        self._kept: dict[RequestId, BlockId] = {}
        self._lent: dict[RequestId, tuple[BlockId, int]] = {}

    def keep(self, request_id: RequestId, block_id: BlockId) -> None:
        """Pin the last block of a request that ends, until it is claimed or the next step begins."""
        if self.keeps_any:
            self._pins.hold([block_id])
            self._kept[request_id] = block_id

    def claim(self, request_id: RequestId) -> BlockId | None:
        """Pass a kept block and its pin to the caller; None if there is none."""
        return self._kept.pop(request_id, None)

    def free_kept(self) -> None:
        """Unpin the kept blocks that were not claimed."""
        if self._kept:
            self._pins.unpin(list(self._kept.values()))
            self._kept.clear()

    def lend(self, request_id: RequestId, block_id: BlockId, num_tokens: int) -> None:
        """Lend a block, which the caller has pinned, to a waiting request; its first `num_tokens` tokens are computed."""
        self.free_lent(request_id)
        if num_tokens > 0:
            self._lent[request_id] = block_id, num_tokens
        else:
            self._pins.unpin([block_id])

    def lent_tokens(self, request_id: RequestId) -> int:
        """Count the computed tokens in the block lent to a request; 0 if there is none."""
        lent = self._lent.get(request_id)
        return 0 if lent is None else lent[1]

    def take_lent(self, request_id: RequestId) -> BlockId:
        """Turn the pin of a lent block into a reference of the request's sequence."""
        block_id, _ = self._lent.pop(request_id)
        self._pins.pass_on([block_id])
        return block_id

    def free_lent(self, request_id: RequestId) -> None:
        """Unpin the block lent to a request; no error if there is none."""
        lent = self._lent.pop(request_id, None)
        if lent is not None:
            self._pins.unpin([lent[0]])

    def free_all_lent(self) -> bool:
        """Unpin all lent blocks, since other requests need them; return whether there were any."""
        lent = tuple(self._lent)
        for request_id in lent:
            self.free_lent(request_id)
        return bool(lent)

    def check(self, waiting: set[RequestId]) -> None:
        """Raise AssertionError if a lent block belongs to no waiting request, or a block is not pinned."""
        assert self._lent.keys() <= waiting, "a block was lent to a request that does not wait"
        held = self._pins.holders()
        for block_id in (*self._kept.values(), *(block_id for block_id, _ in self._lent.values())):
            assert held.get(block_id, 0) > 0, f"block {block_id} of a tail is not held"
