"""Whether a prompt is computed where its answer is, or by a prefill worker that hands it over; two sums of seconds decide.

Beside the prices of both workers there is what the move takes: each block that the decode worker lacks, over the way
between the two.
Policies that predict no times go by the number of tokens to compute.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.core.types import Tier
from penstock.router.chooser import Choice, Chooser
from penstock.router.config import DisaggConfig
from penstock.router.policies import recomputed_blocks
from penstock.seams import RoutingContext

_MOVED = list(Tier).index(Tier.OBJECT)
"""What is to be moved is priced as if it lay in the last tier: at so many seconds a token."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both sums, in seconds (or in the policy's own numbers, None where these cannot be compared).

    `local` is all of it on the decode worker; `prefill` and `decode` are its parts elsewhere, the move in the latter.
    """

    local: float | None
    prefill: float | None
    decode: float | None
    is_remote: bool

    @property
    def remote(self) -> float | None:
        """The whole of it elsewhere."""
        return None if self.prefill is None or self.decode is None else self.prefill + self.decode


@dataclass(frozen=True, slots=True, kw_only=True)
class Apart:
    """What it takes to answer a request by two workers, beside its context as a whole.

    `prefillers` (num_slots,) may compute its prompt, and whose turn that is `prompt_turn` says; `blocks` of it move to who
    answers, which takes `block_s` (num_slots,) seconds for each from the one of them that costs least, beyond what passes
    while the prompt is computed: to those whose kind, of `kinds` (num_slots,), fits the prefill worker's by `fits`
    (producers' kinds, takers' kinds).
    """

    prefillers: NDArray[np.bool_]
    prompt_turn: int
    blocks: int
    block_s: NDArray[np.float64]
    kinds: NDArray[np.intp]
    fits: NDArray[np.bool_]
    config: DisaggConfig

    def takers(self, prefiller: int) -> NDArray[np.bool_]:
        """Mask (num_slots,) those who can take over what the worker in this slot has computed."""
        takers: NDArray[np.bool_] = self.fits[self.kinds[prefiller]][self.kinds]
        return takers

    def prompt(self, context: RoutingContext) -> RoutingContext:
        """Show its prompt alone, to price it on prefill workers."""
        return prompt_alone(context, self.prefillers, self.prompt_turn)


@dataclass(frozen=True, slots=True)
class Weighed:
    """Both ways to answer a request: `whole` is by one worker, `prompt` the first part of the other way."""

    apart: Apart
    whole_context: RoutingContext
    whole: Choice
    prompt_context: RoutingContext
    prompt: Choice
    comparison: Comparison

    @property
    def context(self) -> RoutingContext:
        """Of the way that is taken."""
        return self.prompt_context if self.comparison.is_remote else self.whole_context

    @property
    def choice(self) -> Choice:
        """Who is next on that way."""
        return self.prompt if self.comparison.is_remote else self.whole

    def costs_more(self, slot: int) -> float | None:
        """Say what another worker would have cost beyond the choice; None where the ways are not compared by cost.

        Below nothing where the prompt was too long for the cheaper way.
        """
        is_prompt, comparison = bool(self.apart.prefillers[slot]), self.comparison
        choice = self.prompt if is_prompt else self.whole
        prices = choice.prices()
        more = float(prices[slot] - prices[choice.slot])
        if is_prompt == comparison.is_remote:
            return more
        if comparison.local is None or comparison.remote is None:
            return None
        apart = comparison.remote - comparison.local
        return more + (apart if is_prompt else -apart)


def prompt_alone(context: RoutingContext, prefillers: NDArray[np.bool_], turn: int) -> RoutingContext:
    """Show a request's prompt to those who may compute it for others; `turn` says whose turn it is."""
    return context.changed(eligible=prefillers, mean_output_tokens=1.0, prompt_only=True, turn=turn)


def left_to_move(
    block_s: NDArray[np.float64],
    blocks: int,
    tokens: int,
    *,
    uncached_tokens: int,
    chunk_tokens: int,
    prefill_s: float,
) -> NDArray[np.float64]:
    """Say what blocks take beyond what passes while their prompt is computed, as they move by chunk.

    The first can go when the first chunk is computed, and the last ones only when the last is.

    Args:
        block_s: (num_slots,) seconds that each takes to each worker.
        blocks: of the prompt.
        tokens: of it.
        uncached_tokens: those to be computed by who hands it over.
        chunk_tokens: that this one computes at a time.
        prefill_s: what all of them take it.

    Returns:
        (num_slots,) seconds, as a mean of all the blocks.
    """
    chunks = -(-uncached_tokens // chunk_tokens)
    if chunks < 2 or not blocks:
        return block_s
    last_tokens = uncached_tokens - (chunks - 1) * chunk_tokens
    meanwhile_s = prefill_s * (1 - chunk_tokens / uncached_tokens)
    early_s = blocks * block_s * (1 - last_tokens / tokens)
    left_s: NDArray[np.float64] = block_s - np.minimum(meanwhile_s, early_s) / blocks
    return left_s


def as_handed_over(
    context: RoutingContext, handed_blocks: int, block_s: NDArray[np.float64], takers: NDArray[np.bool_]
) -> RoutingContext:
    """Show a request whose leading blocks a prefill worker has, to price it on those that may go on with it.

    Args:
        context: as it is without.
        handed_blocks: how many blocks would be moved to who has none.
        block_s: (num_slots,) seconds that one takes to each worker.
        takers: (num_slots,) who can take them over.
    """
    cached = context.overlap_blocks
    overlaps = np.where(takers, np.maximum(cached, handed_blocks), cached)
    tiers = context.tier_blocks.copy()
    tiers[_MOVED] += (overlaps - cached).astype(tiers.dtype)
    onboard = context.prices.onboard_token_s.copy()
    onboard[_MOVED] = block_s / context.block_size
    return context.changed(
        overlap_blocks=overlaps,
        tier_blocks=tiers,
        prices=context.prices.with_onboard(onboard),
    )


def weigh(
    chooser: Chooser, context: RoutingContext, tie: int, apart: Apart, prompt: Choice | None = None
) -> Weighed:
    """Decide where a prompt is computed, and by whom.

    Args:
        chooser: by whose prices.
        context: of the request, on the workers that may answer it.
        tie: settles equal prices.
        apart: who else may compute its prompt.
        prompt: who of these costs least; None to find out.
    """
    whole = chooser.choose(context, tie)
    prompt_context = apart.prompt(context)
    prompt = prompt or chooser.choose(prompt_context, tie)
    cached = int(context.overlap_blocks[whole.slot]) - recomputed_blocks(context, whole.slot)
    uncached_tokens, config = context.request_tokens - cached * context.block_size, apart.config
    if uncached_tokens < config.remote_tokens_min:
        comparison = Comparison(_cost(whole), None, None, is_remote=False)
    elif not chooser.term_names:
        comparison = Comparison(None, None, None, is_remote=True)
    else:
        takers = apart.takers(prompt.slot)
        rest = chooser.choose(as_handed_over(context, apart.blocks, apart.block_s, takers), tie)
        local, prefill, after = _cost(whole), _cost(prompt), _cost(rest) + config.hand_over_s
        too_long = config.local_tokens_max is not None and uncached_tokens > config.local_tokens_max
        comparison = Comparison(local, prefill, after, is_remote=too_long or prefill + after < local)
    return Weighed(apart, context, whole, prompt_context, prompt, comparison)


def _cost(choice: Choice) -> float:
    """Give what the cheapest worker costs."""
    return float(choice.terms[:, choice.slot].sum())
