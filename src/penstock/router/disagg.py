"""The disaggregation decision: one worker answers a request alone, or a prefill and a decode worker answer it together.

The cheaper sum of predicted seconds wins. The disaggregated sum adds the KV transfer: every block that the decode worker
lacks, at the link's bandwidth, plus the link's set-up. A policy that predicts no seconds sends every longer prompt to a prefill
worker.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.core.types.events import Tier
from penstock.core.types.instances import Instance, Role
from penstock.router.config import DisaggConfig, RouterConfig
from penstock.router.fleet.fleet import Fleet
from penstock.router.fleet.links import KvKinds, KvTransferPairs, common_transports
from penstock.router.fleet.worker_pool import ModelPool
from penstock.router.policies import recomputed_blocks
from penstock.router.selector import WorkerChoice, WorkerSelector
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


_NEVER, _EVER = np.inf, -np.inf
_WITHIN_A_PROCESS = ("memory",)


@dataclass(frozen=True, slots=True)
class LinkCredit:
    """Seconds that a request loses by avoiding the link from the prefill worker in slot `source` to the decode worker in `reader`."""

    source: int
    reader: int
    seconds: float


class LinkSetup:
    """What a request is charged for the first KV transfer between two workers, by slots of the workers.

    The first read over a link takes longer because it sets the link up. Charged in full, the set-up could keep a link from ever
    being used, as one request gains less than the set-up costs. Charged to no request, the set-up delays the first short prompt.
    So the ski rental rule applies: a request that avoids a link credits the link with the seconds that avoiding it cost, and the
    credit is taken off the next charge. Avoided links never cost more than one set-up altogether. A link is never closed while
    both workers live.

    Source: Karlin, Manasse, Rudolph and Sleator, "Competitive snoopy caching", 1988.
    """

    def __init__(self, num_slots: int, selector: WorkerSelector) -> None:
        """Know of no link that was used."""
        self._num_slots = num_slots
        self._selector = selector
        self._opened_s: dict[int, NDArray[np.float64]] = {}  # by source; `_EVER` where it has moved bytes
        self._credit_s: dict[int, NDArray[np.float64]] = {}  # by source
        self._settled: dict[int, NDArray[np.float64]] = {}  # by source, the set-ups of which nothing is left
        self._setups: dict[int, tuple[NDArray[np.intp], NDArray[np.float64] | None]] = {}  # by source

    def setup_s(self, pool: ModelPool, context: RoutingContext, source: int) -> NDArray[np.float64] | None:
        """Give what is charged for each link from a worker, in seconds; None where the policy predicts no seconds."""
        if not self._selector.term_names:
            return None
        return self.charge_s(source, self.setups_s(pool.pairs, source), context.now_s)

    def taken(self, decision: DisaggDecision, tie: int, *, again: bool) -> None:
        """Open the link that the request uses, and credit the link that the request avoids."""
        credit = None if again else self.credit(decision, tie)
        prefill, now_s = decision.slots[1], decision.whole_context.now_s
        if prefill is not None:
            self.open(prefill, decision.slots[0], now_s)
        if credit is not None:
            self.credit_link(credit)

    def moved(self, source: int, reader: int) -> None:
        """Note that the worker in slot `reader` has read KV of the worker in slot `source`."""
        self._know(source)
        self._opened_s[source][reader] = _EVER

    def grow(self, num_slots: int) -> None:
        """Have this many slots."""
        more = num_slots - self._num_slots
        self._num_slots = num_slots
        self._settled.clear()
        for source in self._opened_s:
            self._opened_s[source] = np.pad(self._opened_s[source], (0, more), constant_values=_NEVER)
            self._credit_s[source] = np.pad(self._credit_s[source], (0, more))

    def forget(self, slot: int) -> None:
        """Forget the worker in a slot."""
        for by_source in (self._opened_s, self._credit_s, self._setups):
            by_source.pop(slot, None)
        self._settled.clear()
        for source in self._opened_s:
            self._opened_s[source][slot] = _NEVER
            self._credit_s[source][slot] = 0.0

    def check(self, num_slots: int) -> None:
        """Raise AssertionError where slots, credits and set-ups disagree."""
        assert self._num_slots == num_slots, "link set-ups: as many slots as loads"
        assert self._opened_s.keys() == self._credit_s.keys(), "link set-ups: opened and credited alike"
        for source, opened_s in self._opened_s.items():
            credit_s = self._credit_s[source]
            assert len(opened_s) == len(credit_s) == self._num_slots, f"slot {source}: as long as the loads"
            assert (credit_s >= 0).all(), f"slot {source}: negative credit"
            settled = self._settled.get(source)
            if settled is not None:
                assert ((opened_s < _NEVER) | (credit_s >= settled)).all(), f"slot {source}: settled"
        assert self._settled.keys() <= self._opened_s.keys(), "link set-ups: settled but unknown"

    def setups_s(self, pairs: KvTransferPairs, source: int) -> NDArray[np.float64] | None:
        """Give the seconds from the first read of the KV of the worker in slot `source` until bytes move, by reader.

        Returns:
            (num_slots,), the same object until a worker comes, changes or goes, not to be written to; None for no seconds.
        """
        numbers = pairs.kinds(self._num_slots).numbers
        known = self._setups.get(source)
        if known is None or known[0] is not numbers:
            setups_s = np.zeros(self._num_slots)
            for slot, prefill, reader in pairs.readers(source, self._num_slots):
                if reader.role is not Role.PREFILL:
                    setups_s[slot] = _setup_s(prefill, reader)
            known = self._setups[source] = numbers, setups_s if setups_s.any() else None
        return known[1]

    def charge_s(
        self, source: int, setups_s: NDArray[np.float64] | None, now_s: float
    ) -> NDArray[np.float64] | None:
        """Give what is left to charge for each link from a worker: the set-up less credit, or less the time since it began.

        Args:
            source: the prefill worker's slot.
            setups_s: (num_slots,) seconds that set-ups take; None for none, and the same object as long as they are the same.
            now_s: the loop's time.

        Returns:
            (num_slots,) seconds, not to be written to; None where nothing is charged.
        """
        if setups_s is None or self._settled.get(source) is setups_s:
            return None
        opened_s = self._opened_s.get(source)
        if opened_s is None:
            return setups_s
        paid_s = np.where(opened_s < _NEVER, now_s - opened_s, self._credit_s[source])
        charge_s: NDArray[np.float64] = np.maximum(setups_s - paid_s, 0.0)
        if not np.count_nonzero(charge_s):
            self._settled[source] = setups_s
            return None
        return charge_s

    def credit(self, decision: DisaggDecision, tie: int) -> LinkCredit | None:
        """Compare a decision by cost with the one that a free link would have made; None where they are the same."""
        compared, rest, context = decision.comparison, decision.rest, decision.rest_context
        if decision.inputs.setup_s is None or compared.remote is None:
            return None
        if compared.setting is not None and not compared.is_remote:
            return None  # a setting kept the prompt from the link, not the link's charge
        assert rest is not None, "compared by cost"
        assert context is not None, "compared by cost"
        prices, round_trip_s = context.prices, decision.whole_context.prices.round_trip_s
        prices = prices.with_move(prices.onboard_token_s, round_trip_s)
        free = self._selector.choose(context.changed(prices=prices), tie)
        if compared.is_remote:
            if free.slot == rest.slot:
                return None
            costs = free.prices()
            seconds = float(costs[rest.slot] - costs[free.slot])
        else:
            assert compared.local is not None, "compared by cost"
            assert compared.prefill is not None, "compared by cost"
            seconds = compared.local - (compared.prefill + free.cost + compared.kv_transfer)
        return None if seconds <= 0 else LinkCredit(decision.prompt.slot, free.slot, seconds)

    def credit_link(self, credit: LinkCredit) -> None:
        """Take what a request lost by avoiding a link off the link's charge."""
        self._know(credit.source)
        self._credit_s[credit.source][credit.reader] += credit.seconds

    def open(self, source: int, reader: int, now_s: float) -> None:
        """Note that a request uses a link: an unused link is being set up from now on."""
        self._know(source)
        if self._opened_s[source][reader] == _NEVER:
            self._opened_s[source][reader] = now_s
            self._settled.pop(source, None)  # whatever credit there was, it takes its time now

    def _know(self, source: int) -> None:
        if source not in self._opened_s:
            self._opened_s[source] = np.full(self._num_slots, _NEVER)
            self._credit_s[source] = np.zeros(self._num_slots)


def _setup_s(source: Instance, reader: Instance) -> float:
    """Give the seconds until KV first moves between two workers that fit; 0 where neither keeps memory for KV.

    Between hosts an agent prepares every transport when it connects. Within a host the slow transports wait until no other works.
    """
    here, there = reader.exchange, source.exchange
    if here is None or there is None or source.engine.kv_layout is None:
        return 0.0
    same_host = here.host == there.host
    common = common_transports(here, there, same_host=same_host)
    if there.listens != _WITHIN_A_PROCESS:
        common = common.difference(_WITHIN_A_PROCESS)
    said = zip(here.transports, here.setups_s, strict=False)
    taken_s = [seconds for name, seconds in said if name in common and 0 <= seconds < math.inf]
    which = min if same_host else max
    return which(taken_s, default=0.0)


class DisaggPricing:
    """Prices KV transfers by link bandwidths and link set-ups. One event loop owns it."""

    def __init__(self, fleet: Fleet, selector: WorkerSelector, config: RouterConfig) -> None:
        self._fleet = fleet
        self._selector = selector
        self._config = config.disagg
        self.link_setup = LinkSetup(fleet.loads.num_slots, selector)
        fleet.slot_followers.append(self.link_setup)

    def inputs(
        self,
        pool: ModelPool,
        context: RoutingContext,
        *,
        prefill_mask: NDArray[np.bool_],
        prompt_turn: int,
        prompt: WorkerChoice,
        blocks: int,
    ) -> DisaggInputs:
        """Give the inputs of the decision about a request.

        Args:
            pool: of its model.
            context: of the request.
            prefill_mask: (num_slots,) bool, workers that may compute its prompt.
            prompt_turn: round-robin position among them.
            prompt: the cheapest of them.
            blocks: full KV blocks of the prompt.
        """
        setup_s = self.link_setup.setup_s(pool, context, prompt.slot)
        block_s, setup_s = self._left(context, prompt, blocks, setup_s)
        return DisaggInputs(
            prefill_mask=prefill_mask,
            prompt_turn=prompt_turn,
            blocks=blocks,
            block_s=block_s,
            setup_s=setup_s,
            kinds=pool.pairs.kinds(len(context.eligible)),
            config=self._config,
            always=self._fleet.slots.at(prompt.slot).instance.engine.transferred_prompts_only,
        )

    def taken(self, decision: DisaggDecision, tie: int, *, again: bool) -> None:
        """Account for a decision that is carried out; `again` replaces an earlier decision about the same request."""
        self.link_setup.taken(decision, tie, again=again)

    def check(self) -> None:
        """Raise AssertionError where the link set-ups are broken."""
        self.link_setup.check(self._fleet.loads.num_slots)

    def _left(
        self, context: RoutingContext, prompt: WorkerChoice, blocks: int, setup_s: NDArray[np.float64] | None
    ) -> tuple[NDArray[np.float64], NDArray[np.float64] | None]:
        """Give the seconds for a block to each worker, and for the link, beyond what passes during the prefill."""
        # All eligible workers have blocks of one size.
        reader = self._fleet.slots.at(int(context.eligible.argmax()))
        byte_s = self._fleet.link_bandwidths.byte_s(prompt.slot)
        block_s = byte_s * reader.instance.engine.kv_bytes_per_block
        if self._selector.prefill_term is None:
            return block_s, setup_s
        instance = self._fleet.slots.at(prompt.slot).instance
        cached = int(context.overlap_blocks[prompt.slot]) * context.block_size
        uncached = max(context.request_tokens - cached, 1)
        streams = instance.exchange is not None and instance.exchange.streams
        return left_to_move(
            block_s,
            setup_s,
            blocks,
            context.request_tokens,
            uncached_tokens=uncached,
            chunk_tokens=instance.engine.max_batch_tokens if streams else uncached,
            prefill_s=float(prompt.terms[self._selector.prefill_term, prompt.slot]),
        )


def left_to_move(
    block_s: NDArray[np.float64],
    setup_s: NDArray[np.float64] | None,
    blocks: int,
    tokens: int,
    *,
    uncached_tokens: int,
    chunk_tokens: int,
    prefill_s: float,
) -> tuple[NDArray[np.float64], NDArray[np.float64] | None]:
    """Take off what passes while the prompt is computed.

    The decode worker sets the link up from the start of the prefill. Blocks move from the end of the first chunk on, and the
    last chunk's blocks after the prefill.

    Args:
        block_s: (num_slots,) seconds that each block takes to each worker.
        setup_s: (num_slots,) seconds before the first block moves; None for none.
        blocks: of the prompt.
        tokens: of the prompt.
        uncached_tokens: that the prefill worker computes.
        chunk_tokens: that it computes at a time, before the first blocks can move.
        prefill_s: seconds for all of them.

    Returns:
        what is left of both, the first as a mean of all the blocks.
    """
    chunks = -(-uncached_tokens // chunk_tokens)
    last_tokens = uncached_tokens - (chunks - 1) * chunk_tokens
    first_s = prefill_s * min(chunk_tokens / uncached_tokens, 1.0)
    begin_s = first_s if setup_s is None else np.maximum(first_s, setup_s)
    early_s = blocks * block_s * max(1 - last_tokens / tokens, 0.0)
    left_s = block_s - np.minimum(np.maximum(prefill_s - begin_s, 0.0), early_s) / max(blocks, 1)
    return left_s, None if setup_s is None else np.maximum(setup_s - prefill_s, 0.0)
