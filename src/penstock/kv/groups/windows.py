"""Blocks that a running request holds for layers with a sliding window, beside the blocks of its tokens."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Windows:
    """Sliding windows of a model in which other layers attend to the whole context.

    A block of the pool has the KV of `block_size` tokens in the layers over the whole context. Layers with a window take
    blocks of the same bytes, as many as their number makes of it.

    layers:       (window in tokens, number of layers with it) for each size of window; empty: the model has one table
    whole_layers: layers over the whole context
    """

    layers: tuple[tuple[int, int], ...] = ()
    whole_layers: int = 1

    def blocks(self, tokens: int, step_tokens: int, block_size: int) -> int:
        """Count the blocks of a request's windows.

        Args:
            tokens: most tokens of the request.
            step_tokens: most of its tokens in one step, from 1 on: all are kept, and the window before the block that the step
                begins in, which is cached for later requests.
            block_size: tokens in a block.
        """
        if not self.layers:
            return 0
        whole = -(-tokens // block_size)
        in_layers = sum(
            count * min(whole, -(-(window - 1) // block_size) - (1 - step_tokens) // block_size + 1)
            for window, count in self.layers
        )
        return -(-in_layers // self.whole_layers)

    def tokens_beside(self, num_blocks: int, step_tokens: int, block_size: int) -> int:
        """Count the tokens of the longest request that `num_blocks` blocks hold with its windows."""
        least, most = 0, num_blocks
        while least < most:
            middle = (least + most + 1) // 2
            if middle + self.blocks(middle * block_size, step_tokens, block_size) <= num_blocks:
                least = middle
            else:
                most = middle - 1
        return least * block_size


ONE_TABLE = Windows()
"""Of models whose layers all keep the same tokens."""
