"""The requests an engine is running, as columns: what a step needs of all of them at once.

Rows ("slots") are handed out at admission and kept until the sequence ends or is preempted, so that a step is
a few array operations over slots and not a Python loop over requests.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from penstock.core.types import Request, TokenLogprob


@dataclass(slots=True)
class SequenceTable:
    """Columns by slot, preallocated. The scheduler writes it between steps; runners read it. Not thread-safe.

    token_ids:    (slots, context_length) int32, prompt then output
    num_tokens:   (slots,) int32, how many of token_ids are known
    num_computed: (slots,) int32, how many of them have their KV in the pool
    block_tables: (slots, max_blocks) int32, block ids; entries from num_blocks on are 0
    num_blocks:   (slots,) int32
    num_prompt:   (slots,) int32, tokens before the output (without `num_emitted` ones); the output position
                  of the token that a step samples is num_tokens - num_prompt
    requests:     the request in each slot, None for a free one

    A sequence's rows only grow while it keeps its slot. A preempted one comes back later in any slot with its
    output in token_ids and num_computed at what the prefix cache gave: state that a runner keeps by slot is
    valid while `requests[slot]` is the very same object.
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

    slots:      (rows,) int32 into the SequenceTable, each at most once
    num_new:    (rows,) int32, tokens to compute from `num_computed` on; 1 for every decode row. The blocks for
                them are in block_tables already
    num_decode: rows [0, num_decode) compute exactly their one newest token
    samples:    (rows,) bool, the row reaches the end of its known tokens, so a token is sampled for it; true
                for every decode row
    """

    slots: NDArray[np.int32]
    num_new: NDArray[np.int32]
    num_decode: int
    samples: NDArray[np.bool_]


@dataclass(slots=True)
class Sampled:
    """What a runner gives back.

    token_ids: (rows,) int32, -1 where nothing was sampled. At an output position below `min_tokens` a runner
               picks no end-of-sequence or stop token; the scheduler would not end the request there
    logprobs:  by row of the plan, for the requests that ask for them
    """

    token_ids: NDArray[np.int32]
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)
