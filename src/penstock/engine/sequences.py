"""The requests an engine is running, as columns: what a step needs of all of them at once.

Rows ("slots") are handed out once and kept for the life of a sequence in the batch, so that a step is a
few array operations over slots and not a Python loop over requests.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.core.types import Request, TokenLogprob


@dataclass(slots=True)
class SequenceTable:
    """Columns by slot, preallocated. The scheduler writes it; runners read it. Not thread-safe.

    token_ids:    (slots, context_length) int32, prompt then output
    num_tokens:   (slots,) int32, how many of token_ids are known
    num_computed: (slots,) int32, how many of them have their KV in the pool
    block_tables: (slots, max_blocks) int32, block ids; entries past num_blocks are 0
    num_blocks:   (slots,) int32
    num_prompt:   (slots,) int32, tokens before the output (without `num_emitted` ones)
    requests:     the request in each slot, None for a free one
    """

    token_ids: NDArray[np.int32]
    num_tokens: NDArray[np.int32]
    num_computed: NDArray[np.int32]
    block_tables: NDArray[np.int32]
    num_blocks: NDArray[np.int32]
    num_prompt: NDArray[np.int32]
    requests: list[Request | None]

    @classmethod
    def allocate(cls, slots: int, context_length: int, block_size: int) -> "SequenceTable":
        max_blocks = -(-context_length // block_size)
        return cls(
            token_ids=np.zeros((slots, context_length), dtype=np.int32),
            num_tokens=np.zeros(slots, dtype=np.int32),
            num_computed=np.zeros(slots, dtype=np.int32),
            block_tables=np.zeros((slots, max_blocks), dtype=np.int32),
            num_blocks=np.zeros(slots, dtype=np.int32),
            num_prompt=np.zeros(slots, dtype=np.int32),
            requests=[None] * slots,
        )


@dataclass(slots=True)
class StepPlan:
    """What one step computes, decode rows first.

    slots:      (rows,) int32 into the SequenceTable
    num_new:    (rows,) int32, tokens to compute from `num_computed` on; 1 for every decode row
    num_decode: rows [0, num_decode) compute exactly their one newest token
    samples:    (rows,) bool, the row reaches the end of its known tokens, so a token is sampled for it
    """

    slots: NDArray[np.int32]
    num_new: NDArray[np.int32]
    num_decode: int
    samples: NDArray[np.bool_]


@dataclass(slots=True)
class Sampled:
    """What a runner gives back: (rows,) int32 token ids, -1 where nothing was sampled; logprobs by row."""

    token_ids: NDArray[np.int32]
    logprobs: dict[int, TokenLogprob]
