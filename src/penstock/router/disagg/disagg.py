"""The disaggregation decision: one worker answers a request alone, or a prefill and a decode worker answer it together.

The cheaper sum of predicted seconds wins. The disaggregated sum adds the KV transfer: every block that the decode worker
lacks, at the link's bandwidth, plus the link's set-up. Policies that predict no times send every longer prompt to a prefill worker.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.core.types.events import Tier
from penstock.router.config import DisaggConfig
from penstock.router.links.kv_transfer_pairs import KvKinds
from penstock.router.policy.policies import recomputed_blocks
from penstock.router.policy.selector import WorkerChoice, WorkerSelector
from penstock.seams import RoutingContext

_MOVED_TIER = list(Tier).index(Tier.OBJECT)
"""Blocks that come from a prefill worker are priced as if they lay in the last tier."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both sums, in seconds; None where the policy's costs are no times, or where nothing was compared.

    local:       the whole request on the decode worker in `local_slot`
    prefill:     the prompt on the prefill worker `pair[0]`
    decode:      the rest on the decode worker `pair[1]`: KV blocks and the fixed `kv_transfer` included, `link_setup` excluded
    link_setup:  what is charged for a link over which no KV has moved yet
    setting:     the field of `router.disagg` that decided against the sums, None where the sums decided
    """

    local: float | None
    prefill: float | None
    decode: float | None
    is_remote: bool
    link_setup: float = 0.0
    kv_transfer: float = 0.0
    local_slot: int | None = None
    pair: tuple[int, int] | None = None
    setting: str | None = None

    @property
    def remote(self) -> float | None:
        """The sum for two workers."""
        if self.prefill is None or self.decode is None:
            return None
        return self.prefill + self.decode + self.link_setup


@dataclass(frozen=True, slots=True)
class KvMove:
    """The price of moving `blocks` KV blocks of a prompt from the prefill worker in slot `source`.

    decode_workers: (num_slots,) bool, decode workers that can read from it
    block_s: (num_slots,) seconds for each block
    setup_s: (num_slots,) seconds for the link's set-up, charged to decode workers that lack a block; None where nothing is charged
    """

    source: int
    blocks: int
    block_s: NDArray[np.float64]
    decode_workers: NDArray[np.bool_]
    setup_s: NDArray[np.float64] | None

    def charge_s(self, context: RoutingContext, slot: int) -> float:
        """Give the link's set-up charge for a decode worker, in seconds."""
        lacks = self.decode_workers[slot] and context.overlap_blocks[slot] < self.blocks
        return 0.0 if self.setup_s is None or not lacks else float(self.setup_s[slot])


@dataclass(frozen=True, slots=True, kw_only=True)
class DisaggInputs:
    """The inputs of a disaggregation decision, beside the request's routing context.

    prefill_mask:  (num_slots,) bool, workers that may compute the prompt
    prompt_turn: round-robin position among the prefill workers
    blocks:      KV blocks of the prompt that move to the decode worker
    block_s:     (num_slots,) seconds to move one block from the cheapest prefill worker, beyond the prefill itself
    setup_s:     (num_slots,) seconds charged for a link's set-up, beyond the prefill itself; None where nothing is charged
    kinds:       which decode workers can read from which prefill worker
    always:      decode workers compute no prompts, so the answer is disaggregated whatever it costs
    """

    prefill_mask: NDArray[np.bool_]
    prompt_turn: int
    blocks: int
    block_s: NDArray[np.float64]
    setup_s: NDArray[np.float64] | None
    kinds: KvKinds
    config: DisaggConfig
    always: bool = False

    def move(self, prefiller: int) -> KvMove:
        """Give the price of moving the KV that the worker in this slot computes."""
        return KvMove(
            prefiller, self.blocks, self.block_s, self.kinds.decode_workers(prefiller), self.setup_s
        )


@dataclass(frozen=True, slots=True)
class DisaggDecision:
    """Both ways to answer a request: `whole` is one aggregated worker; `prompt` is a prefill worker and `rest` a decode worker.

    `rest` is None where the prompt is too short to be disaggregated.
    """

    inputs: DisaggInputs
    whole_context: RoutingContext
    whole: WorkerChoice
    prompt_context: RoutingContext
    prompt: WorkerChoice
    rest_context: RoutingContext | None
    rest: WorkerChoice | None
    comparison: Comparison

    @property
    def context(self) -> RoutingContext:
        """The context of the worker that computes the prompt."""
        return self.prompt_context if self.comparison.is_remote else self.whole_context

    @property
    def choice(self) -> WorkerChoice:
        """The worker that computes the prompt."""
        return self.prompt if self.comparison.is_remote else self.whole

    @property
    def slots(self) -> tuple[int, int | None]:
        """The decode worker's slot, and the prefill worker's, None where there is none."""
        if self.comparison.is_remote and self.rest is not None:
            return self.rest.slot, self.prompt.slot
        return self.whole.slot, None

    def costs_more(self, decode: int, prefill: int | None) -> float | None:
        """Give what other workers would have cost beyond the choice; None where the two ways are not compared by cost.

        The result is negative where `router.disagg` decided against the cheaper way.
        """
        comparison = self.comparison
        if prefill is None:
            more = self.whole.costs_more(decode)
        elif self.rest is None:
            return None
        else:
            more = self.prompt.costs_more(prefill) + self.rest.costs_more(decode)
        if (prefill is not None) == comparison.is_remote:
            return more
        if comparison.local is None or comparison.remote is None:
            return None
        difference = comparison.remote - comparison.local
        return more + (-difference if prefill is None else difference)


def prompt_alone(context: RoutingContext, prefill_mask: NDArray[np.bool_], turn: int) -> RoutingContext:
    """Give the context of a request's prompt alone, to price the prompt on prefill workers."""
    return context.changed(
        eligible=prefill_mask, mean_output_tokens=1.0, output_tokens=None, prompt_only=True, turn=turn
    )


def as_transferred(context: RoutingContext, move: KvMove) -> RoutingContext:
    """Give the context of a request whose leading blocks come from a prefill worker, to price the rest on decode workers."""
    cached, round_trip_s = context.overlap_blocks, context.prices.round_trip_s
    overlaps = np.where(move.decode_workers, np.maximum(cached, move.blocks), cached)
    tiers = context.tier_blocks.copy()
    tiers[_MOVED_TIER] += (overlaps - cached).astype(tiers.dtype)
    onboard = context.prices.onboard_token_s.copy()
    onboard[_MOVED_TIER] = move.block_s / context.block_size
    if move.setup_s is not None:
        round_trip_s = round_trip_s + move.setup_s * (overlaps > cached)
    return context.changed(
        overlap_blocks=overlaps,
        tier_blocks=tiers,
        prices=context.prices.with_move(onboard, round_trip_s),
    )


def decide(
    selector: WorkerSelector,
    context: RoutingContext,
    tie: int,
    inputs: DisaggInputs,
    prompt: WorkerChoice | None = None,
) -> DisaggDecision:
    """Choose between one aggregated worker, and a prefill and a decode worker.

    Args:
        selector: its policy prices workers.
        context: of the request, on the workers that may answer it.
        tie: settles equal prices.
        inputs: the prefill workers that may compute its prompt, and what transfers cost.
        prompt: the cheapest of these; None to find out.
    """
    whole = selector.choose(context, tie)
    prompt_context = prompt_alone(context, inputs.prefill_mask, inputs.prompt_turn)
    prompt = prompt or selector.choose(prompt_context, tie)
    cached = int(context.overlap_blocks[whole.slot]) - recomputed_blocks(context, whole.slot)
    uncached_tokens, config = context.request_tokens - cached * context.block_size, inputs.config
    if uncached_tokens < config.remote_tokens_min and not inputs.always:
        comparison = Comparison(whole.cost, None, None, is_remote=False)
        return DisaggDecision(inputs, context, whole, prompt_context, prompt, None, None, comparison)
    move = inputs.move(prompt.slot)
    rest_context = as_transferred(context.changed(eligible=context.eligible & move.decode_workers), move)
    rest = selector.choose(rest_context, tie)
    comparison = Comparison(None, None, None, is_remote=True)
    if selector.term_names:
        local, prefill, after = whole.cost, prompt.cost, rest.cost + config.kv_transfer_s
        is_cheaper = prefill + after < local
        too_long = config.local_tokens_max is not None and uncached_tokens > config.local_tokens_max
        link_setup = move.charge_s(context, rest.slot)
        comparison = Comparison(
            local,
            prefill,
            after - link_setup,
            is_remote=inputs.always or too_long or is_cheaper,
            link_setup=link_setup,
            kv_transfer=config.kv_transfer_s,
            local_slot=whole.slot,
            pair=(prompt.slot, rest.slot),
            setting="local_tokens_max" if too_long and not is_cheaper else None,
        )
    return DisaggDecision(inputs, context, whole, prompt_context, prompt, rest_context, rest, comparison)
