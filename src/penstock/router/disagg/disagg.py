"""The disaggregation decision: one worker answers a request alone, or a prefill and a decode worker answer it together.

The cheaper sum of predicted seconds wins. The disaggregated sum adds the KV transfer: every block that the decode worker
lacks, at the link's bandwidth, plus the link's set-up cost (`link_setup`). A decode worker with ITL budget left may still
compute a prompt that would wait long for prefill workers (`itl_budget`). Policies that predict no times compare the number
of tokens to compute.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from penstock.core.types.events import Tier
from penstock.router.config import DisaggConfig
from penstock.router.links.kv_transfer_pairs import Kinds
from penstock.router.links.link_setup import LinkCredit
from penstock.router.policy.policies import cheapest, recomputed_blocks, uncached_tokens
from penstock.router.policy.selector import Choice, WorkerSelector
from penstock.router.workers.itl_budget import Budget
from penstock.seams import RoutingContext

_MOVED = list(Tier).index(Tier.OBJECT)
"""What is to be moved is priced as if it lay in the last tier: at so many seconds a token."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both sums, in seconds (or in the policy's own numbers, None where these cannot be compared).

    `local` is all of it on the decode worker; the others are its parts elsewhere: `prefill`, `decode` with the bytes' move and
    the fixed `kv_transfer`, and `link_setup` for a link over which none has moved yet. `local_slot` is the worker of `local`,
    `pair` the prefill and the decode worker of the others. Who computes it beside streams is expected to make `late_steps`
    of theirs late, which cost `late_s` of its account; `is_sooner` where it does so for the sake of the first token.
    """

    local: float | None
    prefill: float | None
    decode: float | None
    is_remote: bool
    link_setup: float = 0.0
    kv_transfer: float = 0.0
    local_slot: int | None = None
    pair: tuple[int, int] | None = None
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
    """The price of moving `blocks` KV blocks of a prompt from the prefill worker in slot `source`.

    decode_workers: (num_slots,) bool, decode workers that can read from it
    block_s: (num_slots,) seconds for each block
    link_s:  (num_slots,) seconds for the link's set-up, charged to decode workers that lack a block; None where nothing is charged
    """

    source: int
    blocks: int
    block_s: NDArray[np.float64]
    decode_workers: NDArray[np.bool_]
    link_s: NDArray[np.float64] | None

    def charge_s(self, context: RoutingContext, slot: int) -> float:
        """Give the link's set-up charge for a decode worker, in seconds."""
        if (
            self.link_s is None
            or not self.decode_workers[slot]
            or context.overlap_blocks[slot] >= self.blocks
        ):
            return 0.0
        return float(self.link_s[slot])

    def credit(self, slot: int, seconds: float) -> LinkCredit | None:
        """Say that it costs so much not to move them to this slot, if it does."""
        return None if seconds <= 0 else LinkCredit(self.source, slot, seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class DisaggInputs:
    """The inputs of a disaggregation decision, beside the request's routing context.

    prefillers:  (num_slots,) bool, workers that may compute the prompt
    prompt_turn: round-robin position among the prefill workers
    blocks:      KV blocks of the prompt that move to the decode worker
    block_s:     (num_slots,) seconds to move one block from the cheapest prefill worker, beyond the prefill itself
    link_s:      (num_slots,) seconds charged for a link's set-up, beyond the prefill itself; None where nothing is charged
    numbers, hosts, fits: which decode workers can read from which prefill worker, as in `Kinds`
    budget:      ITL interference budget of the decode workers; None for none
    """

    prefillers: NDArray[np.bool_]
    prompt_turn: int
    blocks: int
    block_s: NDArray[np.float64]
    link_s: NDArray[np.float64] | None
    numbers: NDArray[np.intp]
    hosts: NDArray[np.intp]
    fits: NDArray[np.bool_]
    budget: Budget | None
    config: DisaggConfig

    def move(self, prefiller: int) -> Move:
        """Say what moving it takes once the worker in this slot has computed it."""
        decode_workers = Kinds(self.numbers, self.hosts, self.fits).decode_workers(prefiller)
        return Move(prefiller, self.blocks, self.block_s, decode_workers, self.link_s)

    def prompt(self, context: RoutingContext) -> RoutingContext:
        """Show its prompt alone, to price it on prefill workers."""
        return prompt_alone(context, self.prefillers, self.prompt_turn)


@dataclass(frozen=True, slots=True)
class DisaggDecision:
    """Both ways to answer a request: `whole` is one aggregated worker; `prompt` is a prefill worker and `rest` a decode worker.

    `rest` is None where the prompt is too short to be disaggregated. `credit` goes to the link that the request would use
    if its set-up were free.
    """

    inputs: DisaggInputs
    whole_context: RoutingContext
    whole: Choice
    prompt_context: RoutingContext
    prompt: Choice
    rest_context: RoutingContext | None
    rest: Choice | None
    comparison: Comparison
    credit: LinkCredit | None = None

    @property
    def context(self) -> RoutingContext:
        """Of the worker that computes the prompt."""
        return self.prompt_context if self.comparison.is_remote else self.whole_context

    @property
    def choice(self) -> Choice:
        """Give the worker that computes the prompt."""
        return self.prompt if self.comparison.is_remote else self.whole

    @property
    def slots(self) -> tuple[int, int | None]:
        """Give the decode worker, and the prefill worker, None where there is none."""
        if self.comparison.is_remote and self.rest is not None:
            return self.rest.slot, self.prompt.slot
        return self.whole.slot, None

    def costs_more(self, decode: int, prefill: int | None) -> float | None:
        """Say what other workers would have cost beyond the choice; None where the ways are not compared by cost.

        Below nothing where the prompt was too long for the cheaper way.
        """
        comparison = self.comparison
        if prefill is None:
            more = _more(self.whole, decode)
        elif self.rest is None:
            return None
        else:
            more = _more(self.prompt, prefill) + _more(self.rest, decode)
        if (prefill is not None) == comparison.is_remote:
            return more
        if comparison.local is None or comparison.remote is None:
            return None
        difference = comparison.remote - comparison.local
        return more + (-difference if prefill is None else difference)


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
    """Say what blocks and links take beyond what passes while their prompt is computed.

    The decode worker sets the link up from the start. Blocks move from the first chunk on, and the last ones once the last
    chunk is computed.

    Args:
        block_s: (num_slots,) seconds that each takes to each worker.
        link_s: (num_slots,) seconds before the first one goes; None for none.
        blocks: of the prompt.
        tokens: of it.
        uncached_tokens: those to be computed by the prefill worker.
        chunk_tokens: that it computes at a time, before the first blocks can move.
        prefill_s: what all of them take it.

    Returns:
        what is left of both, the first as a mean of all the blocks.
    """
    chunks = -(-uncached_tokens // chunk_tokens)
    last_tokens = uncached_tokens - (chunks - 1) * chunk_tokens
    first_s = prefill_s * min(chunk_tokens / uncached_tokens, 1.0)
    begin_s = first_s if link_s is None else np.maximum(first_s, link_s)
    early_s = blocks * block_s * max(1 - last_tokens / tokens, 0.0)
    left_s = block_s - np.minimum(np.maximum(prefill_s - begin_s, 0.0), early_s) / max(blocks, 1)
    return left_s, None if link_s is None else np.maximum(link_s - prefill_s, 0.0)


def as_transferred(context: RoutingContext, move: Move) -> RoutingContext:
    """Show a request whose leading blocks a prefill worker has, to price it on those that may go on with it.

    Args:
        context: as it is without.
        move: what brings them there.
    """
    cached, round_trip_s = context.overlap_blocks, context.prices.round_trip_s
    overlaps = np.where(move.decode_workers, np.maximum(cached, move.blocks), cached)
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


def passed_over(move: Move, free: Choice, rest: Choice) -> LinkCredit | None:
    """Say what it costs a request not to go to the decode worker that is `free`'s, chosen as if no link were charged for."""
    if free.slot == rest.slot:
        return None
    prices = free.prices()
    return move.credit(free.slot, float(prices[rest.slot] - prices[free.slot]))


def weigh(
    selector: WorkerSelector,
    context: RoutingContext,
    tie: int,
    inputs: DisaggInputs,
    prompt: Choice | None = None,
) -> DisaggDecision:
    """Decide where a prompt is computed, by whom, and who answers.

    Args:
        selector: whose prices decide.
        context: of the request, on the workers that may answer it.
        tie: settles equal prices.
        inputs: the prefill workers that may compute its prompt.
        prompt: who of these costs least; None to find out.
    """
    whole = selector.choose(context, tie)
    prompt_context = inputs.prompt(context)
    prompt = prompt or selector.choose(prompt_context, tie)
    cached = int(context.overlap_blocks[whole.slot]) - recomputed_blocks(context, whole.slot)
    uncached_tokens, config = context.request_tokens - cached * context.block_size, inputs.config
    if uncached_tokens < config.remote_tokens_min:
        comparison = Comparison(_cost(whole), None, None, is_remote=False)
        return DisaggDecision(inputs, context, whole, prompt_context, prompt, None, None, comparison)
    move = inputs.move(prompt.slot)
    decode_context = context.changed(eligible=context.eligible & move.decode_workers)
    rest_context = as_transferred(decode_context, move)
    rest = selector.choose(rest_context, tie)
    credit = None
    if not selector.term_names:
        comparison = Comparison(None, None, None, is_remote=True)
    else:
        local, prefill, after = _cost(whole), _cost(prompt), _cost(rest) + config.kv_transfer_s
        too_long = config.local_tokens_max is not None and uncached_tokens > config.local_tokens_max
        is_remote = too_long or prefill + after < local
        link = move.charge_s(context, rest.slot)
        if move.link_s is not None:
            free = selector.choose(as_transferred(decode_context, replace(move, link_s=None)), tie)
            credit = (
                passed_over(move, free, rest)
                if is_remote
                else move.credit(free.slot, local - (prefill + _cost(free) + config.kv_transfer_s))
            )
        late = _Late.of(selector, context, inputs, whole)
        sooner = late.sooner_here(whole, prompt, tie) if late is not None and is_remote else None
        if sooner is not None:
            whole, local, is_remote, credit = sooner, _cost(sooner), False, None
        comparison = Comparison(
            local,
            prefill,
            after - link,
            is_remote=is_remote,
            link_setup=link,
            kv_transfer=config.kv_transfer_s,
            local_slot=whole.slot,
            pair=(prompt.slot, rest.slot),
        )
        if late is not None and not is_remote:
            comparison = late.charged(comparison, whole.slot, is_sooner=sooner is not None)
    return DisaggDecision(
        inputs, context, whole, prompt_context, prompt, rest_context, rest, comparison, credit
    )


@dataclass(frozen=True, slots=True)
class _Late:
    """What computing a prompt does to the streams of each worker: (num_slots,) `steps` that it makes late, at `cost_s` seconds."""

    selector: WorkerSelector
    steps: NDArray[np.float64]
    cost_s: NDArray[np.float64]
    budget: Budget

    @classmethod
    def of(
        cls, selector: WorkerSelector, context: RoutingContext, inputs: DisaggInputs, whole: Choice
    ) -> "_Late | None":
        """Say it of a request that is priced on all workers; None where none may be late, or nobody knows for how long."""
        budget = inputs.budget
        if budget is None or not selector.predicts_first_tokens:
            return None
        is_slow = ~context.prices.worth_fetching()
        recomputed = (context.tier_blocks * is_slow).sum(axis=0) * context.block_size
        tokens = np.minimum(uncached_tokens(context) + recomputed, context.request_tokens)
        steps = np.ceil(tokens / np.maximum(context.prices.batch_tokens, 1.0)) * (
            context.running_requests > 0
        )
        taken_s = whole.terms[selector.prefill_term] * (steps > 0)
        return cls(selector, steps, steps * budget.step_s + taken_s, budget)

    def sooner_here(self, whole: Choice, prompt: Choice, tie: int) -> Choice | None:
        """Choose who computes the prompt after all, in less than half the time to its first token; None where nobody may.

        A full account is enough for any prompt: what it lacks is made up for before the next one.
        """
        until_first = self.selector.first_token_terms
        here_s = whole.terms[until_first].sum(axis=0)
        there_s = float(prompt.terms[until_first, prompt.slot].sum())
        may = whole.eligible & (2 * here_s < there_s)
        may &= (self.cost_s <= self.budget.left_s) | (self.budget.left_s >= self.budget.most_s)
        if not np.count_nonzero(may):
            return None
        return Choice(cheapest(whole.terms, may, tie), whole.terms, whole.eligible)

    def charged(self, comparison: Comparison, slot: int, *, is_sooner: bool) -> Comparison:
        """Say what the worker in a slot, which computes it, loses."""
        late_steps, late_s = int(self.steps[slot]), float(self.cost_s[slot])
        return replace(comparison, late_steps=late_steps, late_s=late_s, is_sooner=is_sooner)


def _cost(choice: Choice) -> float:
    """Give what the cheapest worker costs."""
    return float(choice.terms[:, choice.slot].sum())


def _more(choice: Choice, slot: int) -> float:
    """Give what a worker costs beyond the cheapest."""
    prices = choice.prices()
    return float(prices[slot] - prices[choice.slot])
