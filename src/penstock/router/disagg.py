"""Whether a prompt is computed where its answer is, or by a prefill worker that hands it over; two sums of seconds decide.

Beside the prices of both workers there is what the move takes: each block that the decode worker lacks, over the way
between the two, and what is charged for setting that up (`cold_links`). Whatever the sums say, a prompt that would wait long for
prefill workers may be computed by who answers it as long as few of the streams there notice (`late_tokens`).
Policies that predict no times go by the number of tokens to compute.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from penstock.core.types import Tier
from penstock.router.chooser import Choice, Chooser
from penstock.router.cold_links import Foregone
from penstock.router.config import DisaggConfig
from penstock.router.hand_over_pairs import Kinds
from penstock.router.late_tokens import Allowance
from penstock.router.policies import cheapest, recomputed_blocks, uncached_tokens
from penstock.seams import RoutingContext

_MOVED = list(Tier).index(Tier.OBJECT)
"""What is to be moved is priced as if it lay in the last tier: at so many seconds a token."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both sums, in seconds (or in the policy's own numbers, None where these cannot be compared).

    `local` is all of it on the decode worker; the others are its parts elsewhere: `prefill`, `decode` with the bytes' move,
    and `link_setup` for a link over which none has moved yet. Who computes it beside streams is expected to make `late_steps`
    of theirs late, which cost `late_s` of its account; `is_sooner` where it does so for the sake of the first token.
    """

    local: float | None
    prefill: float | None
    decode: float | None
    is_remote: bool
    link_setup: float = 0.0
    late_steps: int = 0
    late_s: float = 0.0
    is_sooner: bool = False

    @property
    def remote(self) -> float | None:
        """The whole of it elsewhere."""
        if self.prefill is None or self.decode is None:
            return None
        return self.prefill + self.decode + self.link_setup


@dataclass(frozen=True, slots=True)
class Move:
    """What it takes to move `blocks` of a prompt from a worker, in slot `source`, to those of `takers` (num_slots,).

    Each takes `block_s` (num_slots,) seconds, and `link_s` (num_slots,) is charged once who lacks any, for a link's first use; None
    where nothing is.
    """

    source: int | None
    blocks: int
    block_s: NDArray[np.float64]
    takers: NDArray[np.bool_]
    link_s: NDArray[np.float64] | None

    def charge_s(self, context: RoutingContext, slot: int) -> float:
        """Give what a taker is charged for the link."""
        if self.link_s is None or not self.takers[slot] or context.overlap_blocks[slot] >= self.blocks:
            return 0.0
        return float(self.link_s[slot])

    def foregone(self, slot: int, seconds: float) -> Foregone | None:
        """Say that it costs so much not to move them to this slot, if it does."""
        return None if self.source is None or seconds <= 0 else Foregone(self.source, slot, seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Apart:
    """What it takes to answer a request by two workers, beside its context as a whole.

    `prefillers` (num_slots,) may compute its prompt, and whose turn that is `prompt_turn` says; `blocks` of it move to who
    answers, which takes `block_s` (num_slots,) seconds for each from the one of them that costs least, and `link_s`
    (num_slots,) for the first use of a link where any is charged, both beyond what passes while the prompt is computed:
    to those whose kind and host, of `numbers` and `hosts` (num_slots,), fit the prefill worker's by `fits`, as `Kinds` has them.
    `allowance` says what steps of those who answer may be late beside what the sums say, None for none.
    """

    prefillers: NDArray[np.bool_]
    prompt_turn: int
    blocks: int
    block_s: NDArray[np.float64]
    link_s: NDArray[np.float64] | None
    numbers: NDArray[np.intp]
    hosts: NDArray[np.intp]
    fits: NDArray[np.bool_]
    allowance: Allowance | None
    config: DisaggConfig

    def move(self, prefiller: int) -> Move:
        """Say what moving it takes once the worker in this slot has computed it."""
        takers = Kinds(self.numbers, self.hosts, self.fits).takers(prefiller)
        return Move(prefiller, self.blocks, self.block_s, takers, self.link_s)

    def prompt(self, context: RoutingContext) -> RoutingContext:
        """Show its prompt alone, to price it on prefill workers."""
        return prompt_alone(context, self.prefillers, self.prompt_turn)


@dataclass(frozen=True, slots=True)
class Weighed:
    """Both ways to answer a request: `whole` is by one worker, `prompt` the first part of the other way.

    `foregone` where it would have been the other way, if nothing were charged for a link.
    """

    apart: Apart
    whole_context: RoutingContext
    whole: Choice
    prompt_context: RoutingContext
    prompt: Choice
    comparison: Comparison
    foregone: Foregone | None = None

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
    link_s: NDArray[np.float64] | None,
    blocks: int,
    tokens: int,
    *,
    uncached_tokens: int,
    chunk_tokens: int,
    prefill_s: float,
) -> tuple[NDArray[np.float64], NDArray[np.float64] | None]:
    """Say what blocks and links take beyond what passes while their prompt is computed, as they move by chunk.

    The first can go when the first chunk is computed and the link is set up, and the last ones only when the last is.

    Args:
        block_s: (num_slots,) seconds that each takes to each worker.
        link_s: (num_slots,) seconds before the first one goes; None for none.
        blocks: of the prompt.
        tokens: of it.
        uncached_tokens: those to be computed by who hands it over.
        chunk_tokens: that this one computes at a time.
        prefill_s: what all of them take it.

    Returns:
        what is left of both, the first as a mean of all the blocks.
    """
    chunks = -(-uncached_tokens // chunk_tokens)
    if chunks < 2 or not blocks:
        return block_s, link_s
    last_tokens = uncached_tokens - (chunks - 1) * chunk_tokens
    meanwhile_s = prefill_s * (1 - chunk_tokens / uncached_tokens)
    early_s = blocks * block_s * (1 - last_tokens / tokens)
    if link_s is None:
        return block_s - np.minimum(meanwhile_s, early_s) / blocks, None
    left_s = block_s - np.minimum(np.maximum(meanwhile_s - link_s, 0.0), early_s) / blocks
    return left_s, np.maximum(link_s - meanwhile_s, 0.0)


def as_handed_over(context: RoutingContext, move: Move) -> RoutingContext:
    """Show a request whose leading blocks a prefill worker has, to price it on those that may go on with it.

    Args:
        context: as it is without.
        move: what brings them there.
    """
    cached, round_trip_s = context.overlap_blocks, context.prices.round_trip_s
    overlaps = np.where(move.takers, np.maximum(cached, move.blocks), cached)
    tiers = context.tier_blocks.copy()
    tiers[_MOVED] += (overlaps - cached).astype(tiers.dtype)
    onboard = context.prices.onboard_token_s.copy()
    onboard[_MOVED] = move.block_s / context.block_size
    if move.link_s is not None:
        round_trip_s = round_trip_s + move.link_s * (overlaps > cached)
    return context.changed(
        overlap_blocks=overlaps,
        tier_blocks=tiers,
        prices=context.prices.with_move(onboard, round_trip_s),
    )


def passed_over(
    chooser: Chooser, context: RoutingContext, tie: int, move: Move, taker: Choice
) -> Foregone | None:
    """Say what it costs a request not to go to the worker that would have had it, were nothing charged for a link."""
    if move.link_s is None:
        return None
    free = _uncharged(chooser, context, tie, move)
    if free.slot == taker.slot:
        return None
    prices = free.prices()
    return move.foregone(free.slot, float(prices[taker.slot] - prices[free.slot]))


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
    foregone = None
    if uncached_tokens < config.remote_tokens_min:
        comparison = Comparison(_cost(whole), None, None, is_remote=False)
    elif not chooser.term_names:
        comparison = Comparison(None, None, None, is_remote=True)
    else:
        move = apart.move(prompt.slot)
        rest = chooser.choose(as_handed_over(context, move), tie)
        local, prefill, after = _cost(whole), _cost(prompt), _cost(rest) + config.hand_over_s
        too_long = config.local_tokens_max is not None and uncached_tokens > config.local_tokens_max
        is_remote = too_long or prefill + after < local
        link = move.charge_s(context, rest.slot)
        if move.link_s is not None and not is_remote:
            free = _uncharged(chooser, context, tie, move)
            foregone = move.foregone(free.slot, local - (prefill + _cost(free) + config.hand_over_s))
        late = _Late.of(chooser, context, apart, whole)
        sooner = late.sooner_here(whole, prompt, tie) if late is not None and is_remote else None
        if sooner is not None:
            whole, local, is_remote = sooner, _cost(sooner), False
        comparison = Comparison(local, prefill, after - link, is_remote=is_remote, link_setup=link)
        if late is not None and not is_remote:
            comparison = late.charged(comparison, whole.slot, is_sooner=sooner is not None)
    return Weighed(apart, context, whole, prompt_context, prompt, comparison, foregone)


@dataclass(frozen=True, slots=True)
class _Late:
    """What computing a prompt does to the streams of each worker: (num_slots,) `steps` that it makes late, at `cost_s` seconds."""

    chooser: Chooser
    steps: NDArray[np.float64]
    cost_s: NDArray[np.float64]
    allowance: Allowance

    @classmethod
    def of(cls, chooser: Chooser, context: RoutingContext, apart: Apart, whole: Choice) -> "_Late | None":
        """Say it of a request that is priced on all workers; None where none may be late, or nobody knows for how long."""
        allowance = apart.allowance
        if allowance is None or not chooser.predicts_first_tokens:
            return None
        is_slow = ~context.prices.worth_fetching()
        recomputed = (context.tier_blocks * is_slow).sum(axis=0) * context.block_size
        tokens = np.minimum(uncached_tokens(context) + recomputed, context.request_tokens)
        steps = np.ceil(tokens / np.maximum(context.prices.batch_tokens, 1.0)) * (
            context.running_requests > 0
        )
        taken_s = whole.terms[chooser.prefill_term] * (steps > 0)
        return cls(chooser, steps, steps * allowance.step_s + taken_s, allowance)

    def sooner_here(self, whole: Choice, prompt: Choice, tie: int) -> Choice | None:
        """Choose who computes the prompt after all, in less than half the time to its first token; None where nobody may.

        A full account is enough for any prompt: what it lacks is made up for before the next one.
        """
        until_first = self.chooser.first_token_terms
        here_s = whole.terms[until_first].sum(axis=0)
        there_s = float(prompt.terms[until_first, prompt.slot].sum())
        may = whole.eligible & (2 * here_s < there_s)
        may &= (self.cost_s <= self.allowance.left_s) | (self.allowance.left_s >= self.allowance.most_s)
        if not np.count_nonzero(may):
            return None
        return Choice(cheapest(whole.terms, may, tie), whole.terms, whole.eligible)

    def charged(self, comparison: Comparison, slot: int, *, is_sooner: bool) -> Comparison:
        """Say what the worker in a slot, which computes it, loses."""
        late_steps, late_s = int(self.steps[slot]), float(self.cost_s[slot])
        return replace(comparison, late_steps=late_steps, late_s=late_s, is_sooner=is_sooner)


def _uncharged(chooser: Chooser, context: RoutingContext, tie: int, move: Move) -> Choice:
    """Choose who would go on with a prompt if nothing were charged for a link."""
    return chooser.choose(as_handed_over(context, replace(move, link_s=None)), tie)


def _cost(choice: Choice) -> float:
    """Give what the cheapest worker costs."""
    return float(choice.terms[:, choice.slot].sum())
