"""An engine's requests, each as a `Sequence`, and the running ones as columns of a `SequenceTable`.

A sequence gets a row ("slot") at admission and keeps it until it ends or is preempted. So a step is a few array
operations over slots, not a Python loop over requests.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from penstock.core.errors import PenstockError, RequestError
from penstock.core.hashing import block_hashes
from penstock.core.types.requests import PromptLogprobs, Request, SamplingParams, TokenLogprob
from penstock.core.wire import HashArray, TokenArray, unpack_hashes, unpack_tokens
from penstock.kv.groups import ONE_TABLE, KvGroups, Windows

LOGPROBS_MAX = 100
PROMPT_LOGPROBS_MAX = 20  # as many rows as a step has tokens have to fit into a frame
BIAS_MAX = 1000
_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 1000),
    "min_p": (0, 1),
    "presence_penalty": (-100, 100),
    "frequency_penalty": (-100, 100),
    "repetition_penalty": (0.001, 1000),
    "seed": (-(1 << 63), (1 << 63) - 1),
    "logprobs": (0, LOGPROBS_MAX),
    "prompt_logprobs": (0, PROMPT_LOGPROBS_MAX),
    "prompt_logprobs_from": (0, (1 << 31) - 1),
}


def checked_sampling(sampling: SamplingParams, *, vocab_size: int, context_length: int) -> SamplingParams:
    """Check the parameters, and clip those beyond what has an effect.

    `top_k` is clipped to the vocabulary and `min_tokens` to the context; stop ids outside the vocabulary are dropped.

    Raises:
        RequestError: a value is out of its range.
    """
    for name, (low, high) in _RANGES.items():
        value = getattr(sampling, name)
        if value is not None and not low <= value <= high:  # NaN is in no range
            raise _refusal(name, f">= {low} and <= {high}", value)
    if not 0 < sampling.top_p <= 1:
        raise _refusal("top_p", "> 0 and <= 1", sampling.top_p)
    if sampling.top_k is not None and sampling.top_k < 1:
        raise _refusal("top_k", ">= 1, or none", sampling.top_k)
    if sampling.min_tokens < 0:
        raise _refusal("min_tokens", ">= 0", sampling.min_tokens)
    _check_tokens(sampling, vocab_size)
    stops = sampling.stop_token_ids
    if stops and min(stops) < 0:
        raise _refusal("stop_token_ids", ">= 0", min(stops))
    top_k = sampling.top_k if sampling.top_k is None else min(sampling.top_k, vocab_size)
    min_tokens = min(sampling.min_tokens, context_length)
    if stops and max(stops) >= vocab_size:
        stops = tuple(token_id for token_id in stops if token_id < vocab_size)
    if (top_k, min_tokens, stops) == (sampling.top_k, sampling.min_tokens, sampling.stop_token_ids):
        return sampling
    return replace(sampling, top_k=top_k, min_tokens=min_tokens, stop_token_ids=stops)


def _check_tokens(sampling: SamplingParams, vocab_size: int) -> None:
    biased = tuple(token_id for token_id, _ in sampling.logit_bias)
    for token_ids in (sampling.allowed_token_ids, biased, *sampling.bad_words):
        lowest, highest = min(token_ids, default=0), max(token_ids, default=0)
        if not 0 <= lowest <= highest < vocab_size:
            raise _refusal(
                "logit_bias, allowed_token_ids, bad_words: token ids",
                f">= 0 and < {vocab_size}",
                lowest if lowest < 0 else highest,
            )
    for _, bias in sampling.logit_bias:
        if not -BIAS_MAX <= bias <= BIAS_MAX:  # NaN is in no range
            raise _refusal("logit_bias", f">= {-BIAS_MAX} and <= {BIAS_MAX}", bias)
    if not all(sampling.bad_words):
        raise _refusal("bad_words", "of one token or more", 0)


def position_keys(keys: NDArray[np.uint64], positions: NDArray[np.integer[Any]]) -> NDArray[np.uint64]:
    """Derive (n,) noise keys of output positions from (n,) keys of requests."""
    return mix64(keys + positions.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))


def mix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scatter consecutive numbers over all 64 bits.

    Source: SplitMix64's finaliser; Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _refusal(name: str, expected: str, value: float) -> RequestError:
    return RequestError(f"{name}: must be {expected}, got {value}", param=name)


_CHOICE_MAX = (1 << 31) - 1


@dataclass(slots=True)
class SequenceTable:
    """Preallocated columns by slot. The scheduler writes them between steps; runners read them. Not thread-safe.

    token_ids:    (slots, context_length) int32, prompt then output
    num_tokens:   (slots,) int32, tokens of token_ids that are known
    num_computed: (slots,) int32, tokens whose KV is in the pool
    block_tables: (slots, max_blocks) int32, block ids; entries from num_blocks on are 0
    num_blocks:   (slots,) int32
    num_prompt:   (slots,) int32, tokens before the output, `num_emitted` tokens excluded; the output position
                  of the token that a step samples is num_tokens - num_prompt
    requests:     the request in each slot, None for a free one
    window_tables: (groups, slots, max_blocks) int32, block ids of groups of layers with a window; only those within the window
                  are there, all others are 0. block_tables are then those of the layers over the whole context

    A sequence's row only grows while it keeps its slot. A preempted sequence returns later in any slot, with its output in
    token_ids and num_computed set to its prefix-cache hit. So state that a runner keeps by slot is valid only while
    `requests[slot]` is the same object.
    """

    token_ids: NDArray[np.int32]
    num_tokens: NDArray[np.int32]
    num_computed: NDArray[np.int32]
    block_tables: NDArray[np.int32]
    num_blocks: NDArray[np.int32]
    num_prompt: NDArray[np.int32]
    requests: list[Request | None]
    window_tables: NDArray[np.int32]

    @classmethod
    def allocate(
        cls,
        slots: int,
        context_length: int,
        block_size: int,
        window_tables: NDArray[np.int32] | None = None,
    ) -> "SequenceTable":
        max_blocks = -(-context_length // block_size)
        return cls(
            token_ids=np.zeros((slots, context_length), dtype=np.int32),
            num_tokens=np.zeros(slots, dtype=np.int32),
            num_computed=np.zeros(slots, dtype=np.int32),
            block_tables=np.zeros((slots, max_blocks), dtype=np.int32),
            num_blocks=np.zeros(slots, dtype=np.int32),
            num_prompt=np.zeros(slots, dtype=np.int32),
            requests=[None] * slots,
            window_tables=np.zeros((0, slots, max_blocks), np.int32)
            if window_tables is None
            else window_tables,
        )


@dataclass(slots=True)
class StepPlan:
    """The slots and tokens that one step computes, decode rows first.

    slots:      (rows,) int32 into the SequenceTable, each at most once
    num_new:    (rows,) int32, tokens to compute from `num_computed` on; 1 for every decode row. Their blocks
                are in block_tables already
    num_decode: rows [0, num_decode) compute exactly their newest token; a sequence's first step in a slot is
                never a decode row
    samples:    (rows,) bool, the row reaches the end of its known tokens, so a token is sampled for it; true
                for every decode row
    """

    slots: NDArray[np.int32]
    num_new: NDArray[np.int32]
    num_decode: int
    samples: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """Of one row of a plan: the prompt tokens [start, end), each given by the logits of the token before it, which the step computes.

    alternatives: how many of the most likely tokens are reported at each
    """

    row: int
    slot: int
    start: int
    end: int
    alternatives: int


def prompt_spans(plan: StepPlan, table: SequenceTable) -> list[PromptSpan]:
    """List the spans of a plan's prompt tokens that requests want logprobs of. A decode row has no span: output follows its token."""
    spans = []
    for row in range(plan.num_decode, len(plan.slots)):
        slot = int(plan.slots[row])
        request = table.requests[slot]
        if request is None or (alternatives := request.sampling.prompt_logprobs) is None:
            continue
        start = int(table.num_computed[slot]) + 1
        end = min(start + int(plan.num_new[row]), int(table.num_prompt[slot]))
        if start < end:
            spans.append(PromptSpan(row, slot, start, end, alternatives))
    return spans


@dataclass(slots=True)
class Sampled:
    """The result of a runner's step.

    token_ids: (rows,) int32, -1 where nothing was sampled. At an output position below `min_tokens` a runner
               samples no end-of-sequence or stop token; the scheduler would not end the request there
    logprobs:  by row of the plan, for requests that ask for them
    errors:    by row of the plan, for requests that the runner could not prepare; the scheduler ends them and ignores
               their tokens
    embeddings: by row of the plan, for requests that ask for theirs: `Delta.embedding`
    prompt_logprobs: by row of the plan, of the rows of `prompt_spans`
    """

    token_ids: NDArray[np.int32]
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)
    errors: dict[int, PenstockError] = field(default_factory=dict)
    embeddings: dict[int, bytes] = field(default_factory=dict)
    prompt_logprobs: dict[int, PromptLogprobs] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SequenceLimits:
    """Bounds of every request of an engine.

    kv_tokens: capacity of all blocks, less those of one request's windows
    windows:   what sliding windows take beside the blocks of the tokens
    groups:    groups of layers with tables of their own; None: `windows` are counted alone, for runners that keep no KV
    """

    block_size: int
    model_context_length: int
    kv_tokens: int
    vocab_size: int
    hash_key: bytes
    windows: Windows = ONE_TABLE
    groups: KvGroups | None = None

    @property
    def context_length(self) -> int:
        return min(self.model_context_length, self.kv_tokens)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


@dataclass(slots=True)
class Sequence:
    """One accepted request, waiting or running.

    token_ids:     its tokens when it last entered the queue; while it runs, the table has more
    block_hashes:  (n, 2) uint64 of leading full blocks, extended on demand
    end_tokens:    it ends with so many tokens
    stops_after:   a stop token ends it only beyond so many tokens
    cached_tokens: prefix-cache hit of the prompt at first admission; None before
    is_fresh:      no delta was sent yet
    has_begun:     a step has computed some of it, or the current one does
    since_tokens:  prompt tokens that the engine had computed in total when it arrived
    rank:          order in a ranked queue; None otherwise
    turn_end:      where its prompt ends on its tenant's clock; None where tenants take no turns
    is_short:      a load of its prefix ended without all blocks; there is no second one
    reported:      leading prompt tokens whose logprobs were reported, or need not be
    """

    request: Request
    arrival: int
    token_ids: TokenArray
    block_hashes: HashArray
    num_prompt: int
    end_tokens: int
    stops_after: int
    slot: int | None = None
    cached_tokens: int | None = None
    is_fresh: bool = True
    has_begun: bool = False
    since_tokens: int = 0
    rank: float | None = None
    turn_end: float | None = None
    is_short: bool = False
    reported: int = 0

    @classmethod
    def of(
        cls, request: Request, limits: SequenceLimits, *, arrival: int, since_tokens: int = 0
    ) -> "Sequence":
        """Check a request and make its sequence.

        Raises:
            RequestError: the request can never run here, or its fields contradict each other.
        """
        token_ids = _fitting_tokens(request, limits)
        num_prompt = len(token_ids) - request.num_emitted
        sampling = _checked_params(request, limits)
        return cls(
            request=request if sampling is request.sampling else replace(request, sampling=sampling),
            arrival=arrival,
            since_tokens=since_tokens,
            token_ids=token_ids,
            block_hashes=_checked_hashes(request, limits, len(token_ids)),
            num_prompt=num_prompt,
            end_tokens=min(num_prompt + sampling.max_tokens, limits.context_length),
            stops_after=num_prompt + sampling.min_tokens,
            reported=num_prompt
            if sampling.prompt_logprobs is None
            else min(sampling.prompt_logprobs_from, num_prompt),
        )

    @property
    def known(self) -> int:
        """Number of the sequence's tokens when the sequence last entered the queue."""
        return len(self.token_ids)

    @property
    def cacheable(self) -> int:
        """Number of its leading tokens that may come from the prefix cache.

        The last token is computed, to sample from, and so is each token before one whose logprob is still to be reported.
        """
        last = len(self.token_ids) - 1
        return last if self.reported >= self.num_prompt else min(max(self.reported - 1, 0), last)

    def hash_blocks(self, token_ids: TokenArray, count: int, limits: SequenceLimits) -> None:
        """Extend `block_hashes` to the first `count` blocks.

        Args:
            token_ids: (at least count * block_size,) tokens of the sequence.
            count: number of leading blocks that need a hash.
        """
        known = len(self.block_hashes)
        if count <= known:
            return
        low, high = self.block_hashes[-1].tolist() if known else (0, 0)
        more = block_hashes(
            token_ids[known * limits.block_size : count * limits.block_size],
            limits.block_size,
            self.request.salt,
            key=limits.hash_key,
            parent=(low, high) if known else None,
        )
        self.block_hashes = np.concatenate((self.block_hashes, more))


def checked_tokens(request: Request, vocab_size: int) -> TokenArray:
    """Check a request's tokens and its counts of tokens, as every engine does; give the tokens.

    Raises:
        RequestError: there is no token, a token is outside of the vocabulary, or `num_emitted` or `max_tokens` contradicts the tokens.
    """
    count, odd_bytes = divmod(len(request.token_ids), 4)
    if odd_bytes or not count:
        raise RequestError(
            f"token_ids: must be int32 ids, at least one, got {len(request.token_ids)} bytes", param="prompt"
        )
    token_ids = unpack_tokens(request.token_ids)
    lowest, highest = int(token_ids.min()), int(token_ids.max())
    if lowest < 0 or highest >= vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise RequestError(
            f"token id {wrong}: must be >= 0 and < {vocab_size}, the size of the vocabulary", param="prompt"
        )
    if not 0 <= request.num_emitted < count:
        raise RequestError(f"num_emitted: must be >= 0 and < {count}, all tokens, got {request.num_emitted}")
    if request.sampling.max_tokens <= request.num_emitted:
        raise RequestError(
            f"max_tokens: must be > {request.num_emitted}, what was emitted already, got {request.sampling.max_tokens}",
            param="max_tokens",
        )
    return token_ids


def _fitting_tokens(request: Request, limits: SequenceLimits) -> TokenArray:
    token_ids = checked_tokens(request, limits.vocab_size)
    if len(token_ids) >= limits.context_length:
        why = f"the context length is {limits.model_context_length} tokens"
        if limits.kv_tokens < limits.model_context_length:
            why = f"all {limits.kv_tokens // limits.block_size} KV blocks hold {limits.kv_tokens} tokens"
        raise RequestError(
            f"prompt of {len(token_ids)} tokens: must be < {limits.context_length}, as {why}; shorten it",
            param="prompt",
        )
    return token_ids


def _checked_params(request: Request, limits: SequenceLimits) -> SamplingParams:
    if not 0 <= request.choice <= _CHOICE_MAX:
        raise RequestError(f"choice: must be >= 0 and <= {_CHOICE_MAX}, got {request.choice}")
    return checked_sampling(
        request.sampling, vocab_size=limits.vocab_size, context_length=limits.context_length
    )


def _checked_hashes(request: Request, limits: SequenceLimits, num_tokens: int) -> HashArray:
    num_blocks = num_tokens // limits.block_size
    if not request.block_hashes:
        return block_hashes(request.token_ids, limits.block_size, request.salt, key=limits.hash_key)
    if len(request.block_hashes) != num_blocks * 16:
        raise RequestError(
            f"block_hashes: must be {num_blocks} of 16 bytes for {num_tokens} tokens in blocks of {limits.block_size}, "
            f"got {len(request.block_hashes)} bytes; hash with the block size of the model card"
        )
    return unpack_hashes(request.block_hashes).reshape(-1, 2)
