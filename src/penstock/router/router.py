"""Which worker gets a request, and why."""

import asyncio
import math
import random
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.core.ids import WorkerId
from penstock.core.log import get_logger, is_debugging
from penstock.core.radix import PrefixMatch
from penstock.core.types import Request
from penstock.core.wire import num_tokens, unpack_hashes
from penstock.router.chooser import Choice, Chooser
from penstock.router.config import HoldConfig, RouterConfig
from penstock.router.decisions import Decision, Decisions
from penstock.router.disagg import (
    Apart,
    Comparison,
    Move,
    as_handed_over,
    passed_over,
    prompt_alone,
    weigh,
)
from penstock.router.explanation import Explanation, RouteReason
from penstock.router.fleet import Fleet
from penstock.router.handed_over import HandedOver
from penstock.router.metrics import RouterMetrics
from penstock.router.move_prices import MovePrices
from penstock.router.policies import mix, recomputed_blocks, tie_of
from penstock.router.quote import Quote, Route
from penstock.router.recorded import EVENT, RecordedDecision, record_apart, record_context
from penstock.router.worker_pool import WorkerPool
from penstock.seams import RoutingContext

_HASHES = 2.0**64

_log = get_logger()


class Router:
    """Chooses by policy over what the fleet knows. Pure bookkeeping: it sends and waits for nothing."""

    def __init__(
        self, fleet: Fleet, config: RouterConfig, *, metrics: RouterMetrics, rng: random.Random
    ) -> None:
        self.fleet = fleet
        self._chooser = Chooser(config.new_policy(), self._on_failure)
        self._moves = MovePrices(fleet, self._chooser)
        self._has_failed = False
        self._config = config
        if (
            not self._chooser.wait_terms
            and config.hold.threshold_s is not None
            and config.hold != HoldConfig()
        ):
            _log.warning(
                "hold_without_effect",
                policy=config.policy,
                fix="router.hold is set, but this policy predicts no waits, so that nothing is held: choose kv, or a policy"
                " with terms `queue` and `memory`, or leave router.hold out",
            )
        if not self._chooser.predicts_first_tokens and config.disagg.late_token_share:
            _log.warning(
                "late_token_share_without_effect",
                policy=config.policy,
                fix="router.disagg.late_token_share is set, but this policy does not predict when first tokens come, so that"
                " prompts wait for prefill workers: choose kv, or a policy with terms `queue`, `memory` and `prefill`, or leave it out",
            )
        self._has_thresholds = config.busy_kv_share is not None or config.busy_queued_tokens is not None
        self._metrics = metrics
        self._turn = rng.randrange(1 << 16)  # frontends beside each other do not take turns in step
        self._prompt_turn = self._turn  # of its own: else who has two prefill workers would use one of them
        self._decisions = Decisions(config.explain)
        self._log_below = config.explain.logged_share * _HASHES if is_debugging() else 0.0

    @cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        """The loop that owns it, asked for once: asking takes a system call, half a microsecond."""
        return asyncio.get_running_loop()

    def quote(
        self,
        request: Request,
        exclude: Collection[WorkerId] = (),
        *,
        handed: HandedOver | None = None,
        beside: WorkerId | None = None,
    ) -> Quote | None:
        """Price a request on all workers: its prompt on prefill workers, where handing it over costs less.

        Args:
            request: with its block hashes.
            exclude: workers that must not get it.
            handed: what a prefill worker has computed of it, and hands over; None: it is to be decided.
            beside: who has just computed an equal prompt, and gets this one too, if it may; None for anybody.

        Returns:
            None where no worker of its model may get it now.
        """
        pool = self.fleet.pools.get(request.model)
        if pool is None:
            return None
        eligible = self._eligible(request, pool.ready, exclude)
        if eligible is None:
            return None
        slot = None if beside is None else self.fleet.slot_of(beside)
        follows = slot is not None and bool(eligible[slot])
        if follows:
            eligible = np.arange(len(eligible)) == slot
        hashes = unpack_hashes(request.block_hashes)[::2]
        now_s = self._loop.time()
        context = self._context(request, pool, eligible, self.fleet.tree.match(hashes), now_s)
        tie = tie_of(hashes, request.token_ids, context.block_size)

        def quote(context: RoutingContext, choice: Choice, **more: Any) -> Quote:
            return Quote(request, context, choice, tie, exclude, self._chooser.wait_terms, **more)

        if handed is not None:
            blocks = handed.num_tokens(now_s) // context.block_size
            producer = None if handed.producer is None else self.fleet.slot_of(handed.producer)
            move = self._moves.move(pool, context, producer, blocks)
            takers = self._takers(context, move)
            if takers is not None:
                context = context.changed(eligible=context.eligible & takers)
            rest = as_handed_over(context, move)
            choice = self._chooser.choose(rest, tie)
            foregone = passed_over(self._chooser, context, tie, move, choice)
            return quote(
                rest, choice, handed_blocks=blocks, source=producer, foregone=foregone, takers=takers
            )
        prefillers = None if follows else self._prefillers(request, pool, exclude, context)
        if prefillers is None:
            return quote(context, self._chooser.choose(context, tie))
        prompt = self._chooser.choose(prompt_alone(context, prefillers, self._prompt_turn), tie)
        block_s, link_s = self._moves.after(pool, context, prompt, len(hashes))
        kinds = pool.pairs.kinds(len(eligible))
        apart = Apart(
            prefillers=prefillers,
            prompt_turn=self._prompt_turn,
            blocks=len(hashes),
            block_s=block_s,
            link_s=link_s,
            numbers=kinds.numbers,
            hosts=kinds.hosts,
            fits=kinds.fits,
            allowance=self.fleet.late_tokens.allowance(context, self.fleet.loads.peers),
            config=self._config.disagg,
        )
        weighed = weigh(self._chooser, context, tie, apart, prompt)
        is_remote, foregone = weighed.comparison.is_remote, weighed.foregone
        return quote(weighed.context, weighed.choice, hand_over=is_remote, weighed=weighed, foregone=foregone)

    def _eligible(
        self, request: Request, ready: NDArray[np.bool_], exclude: Collection[WorkerId]
    ) -> NDArray[np.bool_] | None:
        """Say which of the workers that are ready may get a request; None where none may."""
        if request.adapter is not None:
            ready = self.fleet.pools[request.model].with_adapter(ready, request.adapter)
        if exclude:
            ready = self._without(ready, exclude)
        if self._has_thresholds and np.count_nonzero(ready) > 1:
            ready = self._without_busy(ready)
        return ready if np.count_nonzero(ready) else None  # 0.2 us, where any() takes 2

    def _takers(self, context: RoutingContext, move: Move) -> NDArray[np.bool_] | None:
        """Say who may go on with a prompt that was computed elsewhere; None for anybody.

        Policies that price what is not cached weigh computing it again; to others all would be alike.
        """
        prices_prompts = self._chooser.prefill_term is not None
        if prices_prompts or not np.count_nonzero(context.eligible & move.takers):
            return None
        return move.takers

    def _prefillers(
        self, request: Request, pool: WorkerPool, exclude: Collection[WorkerId], context: RoutingContext
    ) -> NDArray[np.bool_] | None:
        """Say which prefill workers may get its prompt; None where none may.

        One that hands over to none of those that may go on would compute it for nothing.
        One whose blocks hold no more than it and a token would say that the answer ends there.
        """
        if not pool.num_ready_prefill:
            return None
        total = context.total_blocks
        holds = (total * context.block_size > context.request_tokens + 1) | (total == 0)
        fitting = pool.pairs.producers(pool.ready_prefill, context.eligible)
        return self._eligible(request, fitting & holds, exclude)

    def route(self, request: Request, exclude: Collection[WorkerId] = ()) -> Route | None:
        """Price a request and take the cheapest worker at once."""
        quote = self.quote(request, exclude)
        return None if quote is None else self.take(quote)

    def take(self, quote: Quote, *, again: bool = False) -> Route:
        """Take a quote's cheapest worker; `again` is in place of the one taken before, which was counted."""
        context, slot = quote.context, quote.choice.slot
        overlap_blocks, reason = self._outcome(context, slot)
        if quote.handed_blocks:
            reason = RouteReason.PREFETCHED if quote.is_early else RouteReason.HANDED_OVER
        self._chooser.chosen(context, slot)
        if quote.hand_over:
            self._prompt_turn += 1
        else:
            self._turn += 1
        if self._decisions.keeps_any:
            self._keep(quote, reason)
        if self._log_below and mix(self._turn + self._prompt_turn) < self._log_below:
            self._record(quote)
        overlap_tokens = (overlap_blocks - recomputed_blocks(context, slot)) * context.block_size
        prefill_tokens = max(context.request_tokens - overlap_tokens, 1)
        self._use_links(quote, again=again)
        self._spend(quote, again=again)
        if quote.comparison is not None and not again:
            self._count(quote.comparison, "remote" if quote.hand_over else "local")
        if not again and quote.handed_blocks is None:
            metrics = self._metrics
            metrics.decided(self._chooser.policy.name, reason).inc()
            metrics.prompt_tokens.inc(context.request_tokens)
            metrics.expected_hit_tokens.inc(overlap_tokens)
        return Route(
            worker_id=self.fleet.seats.at(slot).worker_id,
            slot=slot,
            prefill_tokens=prefill_tokens,
            cached_tokens=context.request_tokens - prefill_tokens,
            overlap_blocks=overlap_blocks,
            blocks=context.request_blocks,
            hand_over=quote.hand_over,
        )

    def _use_links(self, quote: Quote, *, again: bool) -> None:
        """Note which link a request goes over, or without which one it does that it would have gone over."""
        links = self.fleet.kv_ways.cold_links
        if quote.foregone is not None and not again:
            links.forgo(quote.foregone)
        if quote.handed_blocks and quote.source is not None:
            links.open(quote.source, quote.choice.slot, quote.context.now_s)

    def _spend(self, quote: Quote, *, again: bool) -> None:
        """Note what a prompt costs streams; of one that came back from where it was to go, both times."""
        comparison = quote.comparison
        if comparison is not None and comparison.late_steps:
            slot, now_s = quote.choice.slot, quote.context.now_s
            self.fleet.late_tokens.spend(slot, comparison.late_s, now_s, int(self.fleet.loads.peers[slot]))
            if not again:
                self._metrics.late_steps.inc(comparison.late_steps)

    def _count(self, comparison: Comparison, place: str) -> None:
        """Count where a prompt is computed, and the seconds that were compared."""
        self._metrics.prefills.labels(place).inc()
        if comparison.remote is None or self._chooser.unit == "none":
            return
        parts = {
            "local": comparison.local,
            "prefill": comparison.prefill,
            "decode": comparison.decode,
            "link_setup": comparison.link_setup,
        }
        for name, seconds in parts.items():
            if seconds is not None and math.isfinite(seconds):  # infinite where a policy rules a worker out
                self._metrics.prefill_predicted_s.labels(name).inc(max(seconds, 0.0))

    def arrived(self, model: str) -> None:
        """Count a request, however often it is routed."""
        pool = self.fleet.pools.get(model)
        if pool is not None:
            pool.traffic.arrived(self._loop.time())

    def has_ready(self, model: str) -> bool:
        """Say whether any worker of the model may get requests."""
        pool = self.fleet.pools.get(model)
        return pool is not None and pool.num_ready > 0

    def explain(self, request_id: str) -> Sequence[Explanation]:
        """Say why a request was sent where it was, each time it was, or each of an answer's choices.

        Returns:
            Oldest first; nothing where nothing is known of it any more.
        """
        return self._decisions.of(request_id, self._loop.time())

    def latest(self, most: int) -> Sequence[Explanation]:
        """Explain the latest decisions, oldest first."""
        return self._decisions.latest(most, self._loop.time())

    def _on_failure(self, error: Exception) -> None:
        """Count and log that the policy failed, the first time where in its code."""
        self._metrics.policy_failures.labels(self._chooser.policy.name).inc()
        _log.error(
            "policy_failed",
            policy=self._chooser.policy.name,
            error=repr(error),
            exc_info=None if self._has_failed else error,
        )
        self._has_failed = True

    def check(self) -> None:
        """Raise AssertionError where too much is kept."""
        self._decisions.check()

    def _without(self, ready: NDArray[np.bool_], exclude: Collection[WorkerId]) -> NDArray[np.bool_]:
        eligible = ready.copy()
        for worker_id in exclude:
            slot = self.fleet.slot_of(worker_id)
            if slot is not None:
                eligible[slot] = False
        return eligible

    def _without_busy(self, eligible: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Leave out the workers past a threshold, unless all are."""
        loads, config = self.fleet.loads, self._config
        calm = eligible.copy()
        if config.busy_kv_share is not None:
            calm &= (loads.active_blocks <= config.busy_kv_share * loads.total_blocks) | (
                loads.total_blocks == 0
            )
        if config.busy_queued_tokens is not None:
            calm &= loads.queued_prefill_tokens <= config.busy_queued_tokens
        return calm if calm.any() else eligible

    def _context(
        self,
        request: Request,
        pool: WorkerPool,
        eligible: NDArray[np.bool_],
        match: PrefixMatch,
        now_s: float,
    ) -> RoutingContext:
        loads, block_size = self.fleet.loads, pool.card.block_size
        request_tokens = num_tokens(request.token_ids)
        return RoutingContext(
            request_tokens=request_tokens,
            request_blocks=-(-request_tokens // block_size),
            block_size=block_size,
            eligible=eligible,
            overlap_blocks=match.depths,
            tier_blocks=match.tiers,
            active_blocks=loads.active_blocks,
            cached_blocks=loads.cached_blocks,
            total_blocks=loads.total_blocks,
            running_requests=loads.running_requests,
            waiting_requests=loads.waiting_requests,
            queued_prefill_tokens=loads.queued_prefill_tokens,
            context_tokens=loads.context_tokens,
            peer_requests=loads.peer_requests,
            peer_prefill_tokens=loads.peer_prefill_tokens,
            peer_prefill_pairs=loads.peer_prefill_pairs,
            own_requests=loads.own_requests,
            own_prefill_tokens=loads.own_prefill_tokens,
            own_prefill_pairs=loads.own_prefill_pairs,
            own_blocks=loads.own_blocks,
            worker_ids=self.fleet.seats.worker_ids,
            session=request.session,
            slo_ttft_s=request.slo_ttft_s,
            slo_itl_s=request.slo_itl_s,
            prices=pool.prices.columns(),
            request_rate_per_s=pool.traffic.rate_per_s(now_s),
            mean_output_tokens=pool.traffic.mean_output_tokens,
            turn=self._turn,
            now_s=now_s,
        )

    def _outcome(self, context: RoutingContext, slot: int) -> tuple[int, RouteReason]:
        """Say how much of the prompt is cached in the slot, and what that makes of the choice."""
        overlaps = context.overlap_blocks
        overlap = int(overlaps[slot])
        if overlaps[overlaps.argmax()] > overlap:  # perhaps where it may not go
            overlaps = overlaps * context.eligible
        best = overlaps[overlaps.argmax()]
        if np.count_nonzero(context.eligible) == 1:
            return overlap, RouteReason.ONLY_WORKER
        if self._chooser.follows_session(context, slot):
            return overlap, RouteReason.SESSION
        if best == 0:
            return overlap, RouteReason.NO_PREFIX
        return overlap, RouteReason.LONGEST_PREFIX if overlap == best else RouteReason.SHORTER_PREFIX

    def _keep(self, quote: Quote, reason: RouteReason) -> None:
        """Keep what a choice went by; of live columns that takes a copy."""
        fleet, request, context = self.fleet, quote.request, quote.context
        self._decisions.keep(
            Decision(
                request_id=request.request_id,
                model=request.model,
                adapter=request.adapter,
                chooser=self._chooser,
                reason=reason,
                slot=quote.choice.slot,
                request_tokens=context.request_tokens,
                request_blocks=context.request_blocks,
                block_size=context.block_size,
                decided_s=context.now_s,
                overlap_blocks=context.overlap_blocks,
                tier_blocks=context.tier_blocks,
                terms=quote.choice.terms,
                eligible=context.eligible.copy(),
                conditions=fleet.seats.conditions.copy(),
                seats=fleet.seats.now(),
                excluded=frozenset(quote.excluded),
                takers=quote.takers,
                comparison=quote.comparison,
            )
        )

    def _record(self, quote: Quote) -> None:
        """Log all that a choice went by, for replays."""
        request, slot, weighed = quote.request, quote.choice.slot, quote.weighed
        workers = [None if member is None else member.instance.name for member in self.fleet.seats.now()]
        recorded = RecordedDecision(
            request_id=request.request_id,
            model=request.model,
            policy=self._config.policy,
            worker=workers[slot] or "",
            slot=slot,
            tie=quote.tie,
            workers=workers,
            context=record_context(quote.context if weighed is None else weighed.whole_context),
            apart=None if weighed is None else record_apart(weighed.apart),
            sessions_max=self._config.sessions_max,
            session_idle_s=self._config.session_idle_s,
        )
        _log.debug(EVENT, **msgspec.structs.asdict(recorded))
