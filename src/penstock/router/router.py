"""The router: which workers get a request, and why."""

import asyncio
import math
import random
from collections.abc import Callable, Collection, Sequence
from functools import cached_property

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.core.ids import WorkerId
from penstock.core.log import get_logger, is_debugging
from penstock.core.types.requests import Request
from penstock.core.wire import num_tokens, unpack_hashes
from penstock.router.candidates import RoutePlan, ScoredCandidates, WorkerRoute
from penstock.router.config import QueueConfig, RouterConfig
from penstock.router.disagg import DisaggPricing, decide, prompt_alone
from penstock.router.explanations import ChoiceInputs, Decisions, RouteReason, RoutingDecision
from penstock.router.fleet.fleet import Fleet
from penstock.router.fleet.worker_pool import ModelPool
from penstock.router.metrics import RouterMetrics
from penstock.router.policies import mix, recomputed_blocks, tie_of
from penstock.router.radix import PrefixMatch
from penstock.router.replay import EVENT, RecordedDecision, record_context, record_inputs
from penstock.router.selector import WorkerChoice, WorkerSelector
from penstock.seams import RoutingContext

_HASHES = 2.0**64

_log = get_logger()


class Router:
    """Chooses workers by policy over the fleet's state. It sends nothing and waits for nothing; one event loop owns it."""

    def __init__(
        self, fleet: Fleet, config: RouterConfig, *, metrics: RouterMetrics, rng: random.Random
    ) -> None:
        self.fleet = fleet
        self._selector = WorkerSelector(config.new_policy(), self._on_failure)
        self.disagg = DisaggPricing(fleet, self._selector, config)
        self._has_failed = False
        self._config = config
        if (
            not self._selector.wait_terms
            and config.queue.threshold_s is not None
            and config.queue != QueueConfig()
        ):
            _log.warning(
                "queue_without_effect",
                policy=config.policy,
                fix="router.queue is set, but this policy predicts no waits, so that nothing is queued: choose kv, or a policy"
                " with terms `queue` and `kv_wait`, or leave router.queue out",
            )
        self._has_thresholds = config.busy_kv_share is not None or config.busy_queued_tokens is not None
        self._metrics = metrics
        self._turn = rng.randrange(1 << 16)  # several frontends do not take turns in step
        self._prompt_turn = (
            self._turn
        )  # its own count: with one for both, of two prefill workers only one would be used
        self.decisions = Decisions(config.explain)
        self.on_routed: Callable[[Request], None] = lambda _request: None
        """Called with each request that workers were chosen for, once."""
        self._log_below = config.explain.logged_share * _HASHES if is_debugging() else 0.0

    @cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        """The loop that owns it, asked for once: asking takes a system call, half a microsecond."""
        return asyncio.get_running_loop()

    def score(
        self,
        request: Request,
        exclude: Collection[WorkerId] = (),
        *,
        beside: WorkerId | None = None,
    ) -> ScoredCandidates | None:
        """Price a request on all workers, and disaggregated where there are prefill workers.

        Args:
            request: with its block hashes.
            exclude: workers that must not get it.
            beside: the worker that has just computed the same prompt, and gets this request if eligible; None for any.

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
        now_s = self._loop.time()
        hashes = unpack_hashes(request.block_hashes)[::2]
        match = self.fleet.match(pool, hashes[: _usable_blocks(request, pool.card.block_size)])
        context = self._context(request, pool, eligible, match, now_s)
        tie = tie_of(hashes, request.token_ids, context.block_size)

        prefill_mask = None if follows else self._prefill_mask(request, pool, exclude, context)
        wait_terms = self._selector.wait_terms
        if prefill_mask is None:
            choice = self._selector.choose(context, tie)
            return ScoredCandidates(request, context, choice, tie, exclude, wait_terms)
        prompt = self._selector.choose(prompt_alone(context, prefill_mask, self._prompt_turn), tie)
        inputs = self.disagg.inputs(
            pool,
            context,
            prefill_mask=prefill_mask,
            prompt_turn=self._prompt_turn,
            prompt=prompt,
            blocks=len(hashes),
        )
        decision = decide(self._selector, context, tie, inputs, prompt)
        return ScoredCandidates(
            request, decision.context, decision.choice, tie, exclude, wait_terms, decision
        )

    def _eligible(
        self, request: Request, ready: NDArray[np.bool_], exclude: Collection[WorkerId]
    ) -> NDArray[np.bool_] | None:
        """Mask the ready workers that may get a request; None where none may."""
        if request.adapter is not None:
            ready = self.fleet.pools[request.model].adapters.among(ready, request.adapter)
        pool = self.fleet.pools[request.model]
        if pool.has_deployments:
            ready = pool.within_reach(request, ready)
        if exclude:
            ready = self._without(ready, exclude)
        if self._has_thresholds and np.count_nonzero(ready) > 1:
            ready = self._without_busy(ready)
        return ready if np.count_nonzero(ready) else None  # 0.2 us, where any() takes 2

    def _prefill_mask(
        self, request: Request, pool: ModelPool, exclude: Collection[WorkerId], context: RoutingContext
    ) -> NDArray[np.bool_] | None:
        """Mask the prefill workers that may get a prompt; None where none may.

        A prefill worker is left out where no eligible decode worker can read its KV, and where its KV holds no more than the
        prompt and one token, as it would end the answer there.
        """
        if not pool.has_ready_prefill:
            return None
        total = context.total_blocks
        holds = (total * context.block_size > context.request_tokens + 1) | (total == 0)
        fitting = pool.pairs.prefill_workers(pool.ready_prefill, context.eligible)
        return self._eligible(request, fitting & holds, exclude)

    def plan(self, request: Request, exclude: Collection[WorkerId] = ()) -> RoutePlan | None:
        """Price a request and take the cheapest workers at once."""
        candidates = self.score(request, exclude)
        return None if candidates is None else self.take(candidates)

    def take(self, candidates: ScoredCandidates, *, again: bool = False) -> RoutePlan:
        """Take the cheapest of the scored candidates; `again` replaces an earlier plan for the same request, which was counted."""
        choices, decision = candidates.choices(), candidates.decision
        cached = candidates.whole_context.overlap_blocks
        parts = [self._part(context, choice, cached) for context, choice in choices]
        if decision is not None:
            self.disagg.taken(decision, candidates.tie, again=again)
        for context, choice in choices:
            self._selector.chosen(context, choice.slot)
        self._turn += 1
        self._prompt_turn += candidates.is_disaggregated
        if self.decisions.keeps_any:
            self._keep(candidates, parts)
        if self._log_below and mix(self._turn + self._prompt_turn) < self._log_below:
            self._record(candidates)
        routes = [self._route(context, choice.slot) for context, choice in choices]
        if not again:
            self._count(candidates, parts[0].reason, routes[0])
            self.on_routed(candidates.request)
        return RoutePlan(routes[-1], prefill=routes[0] if len(routes) > 1 else None)

    def _route(self, context: RoutingContext, slot: int) -> WorkerRoute:
        overlap_blocks = int(context.overlap_blocks[slot])
        overlap_tokens = (overlap_blocks - recomputed_blocks(context, slot)) * context.block_size
        prefill_tokens = max(context.request_tokens - overlap_tokens, 1)
        return WorkerRoute(
            worker_id=self.fleet.slots.at(slot).worker_id,
            slot=slot,
            prefill_tokens=prefill_tokens,
            cached_tokens=context.request_tokens - prefill_tokens,
            overlap_blocks=overlap_blocks,
            blocks=context.request_blocks,
        )

    def _count(self, candidates: ScoredCandidates, reason: RouteReason, prompt: WorkerRoute) -> None:
        """Count a plan, where the prompt is computed, and the seconds that were compared."""
        metrics, tokens = self._metrics, candidates.context.request_tokens
        metrics.decided(self._selector.policy.name, reason).inc()
        metrics.prompt_tokens.inc(tokens)
        metrics.expected_hit_tokens.inc(tokens - prompt.prefill_tokens)
        if candidates.decision is None:
            return
        comparison = candidates.decision.comparison
        metrics.prefills.labels("remote" if comparison.is_remote else "local").inc()
        if comparison.remote is None or self._selector.unit == "none":
            return
        for part in ("local", "prefill", "decode", "link_setup"):
            seconds = getattr(comparison, part)
            if seconds is not None and math.isfinite(seconds):  # infinite where a policy rules a worker out
                metrics.prefill_predicted_s.labels(part).inc(max(seconds, 0.0))

    def arrived(self, request: Request) -> None:
        """Count a request once, however often it is routed."""
        pool = self.fleet.pools.get(request.model)
        if pool is not None:
            pool.traffic.arrived(self._loop.time())

    def _on_failure(self, error: Exception) -> None:
        """Count and log that the policy failed, with a traceback the first time."""
        self._metrics.policy_failures.labels(self._selector.policy.name).inc()
        _log.error(
            "policy_failed",
            policy=self._selector.policy.name,
            error=repr(error),
            exc_info=None if self._has_failed else error,
        )
        self._has_failed = True

    def check(self) -> None:
        """Raise AssertionError where too much is kept."""
        self.decisions.check()
        self.disagg.check()

    def _without(self, ready: NDArray[np.bool_], exclude: Collection[WorkerId]) -> NDArray[np.bool_]:
        eligible = ready.copy()
        for worker_id in exclude:
            slot = self.fleet.slot_of(worker_id)
            if slot is not None:
                eligible[slot] = False
        return eligible

    def _without_busy(self, eligible: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Leave out workers past a busy threshold, unless all are."""
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
        pool: ModelPool,
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
            worker_ids=self.fleet.slots.worker_ids,
            session=_session_key(request),
            slo_ttft_s=request.slo_ttft_s,
            slo_itl_s=request.slo_itl_s,
            prices=pool.prices.columns(),
            request_rate_per_s=pool.traffic.rate_per_s(now_s),
            mean_output_tokens=pool.traffic.mean_output_tokens,
            turn=self._turn,
            now_s=now_s,
            output_tokens=_output_tokens(request),
        )

    def _part(self, context: RoutingContext, choice: WorkerChoice, cached: NDArray[np.int32]) -> ChoiceInputs:
        """Keep the inputs of a choice.

        Args:
            context: that it was chosen in.
            choice: what was chosen.
            cached: (num_slots,) blocks cached before any KV transfer.
        """
        return ChoiceInputs(
            slot=choice.slot,
            reason=self._reason(context, choice.slot, cached),
            overlap_blocks=context.overlap_blocks,
            tier_blocks=context.tier_blocks,
            terms=choice.terms,
            eligible=context.eligible,
        )

    def _reason(self, context: RoutingContext, slot: int, overlaps: NDArray[np.int32]) -> RouteReason:
        """Give the reason of a choice: what the cached prefix made of it."""
        overlap = int(overlaps[slot])
        if overlaps[overlaps.argmax()] > overlap:  # perhaps on a worker that is not eligible
            overlaps = overlaps * context.eligible
        best = overlaps[overlaps.argmax()]
        if np.count_nonzero(context.eligible) == 1:
            return RouteReason.ONLY_WORKER
        if self._selector.follows_session(context, slot):
            return RouteReason.SESSION
        if best == 0:
            return RouteReason.NO_PREFIX
        return RouteReason.LONGEST_PREFIX if overlap == best else RouteReason.SHORTER_PREFIX

    def _keep(self, candidates: ScoredCandidates, parts: Sequence[ChoiceInputs]) -> None:
        """Keep the inputs of a plan for explanations; live columns are copied."""
        fleet, request, context = self.fleet, candidates.request, candidates.whole_context
        self.decisions.keep(
            RoutingDecision(
                request_id=request.request_id,
                model=request.model,
                adapter=request.adapter,
                selector=self._selector,
                request_tokens=context.request_tokens,
                request_blocks=context.request_blocks,
                block_size=context.block_size,
                decided_s=context.now_s,
                decode=parts[-1].kept(),
                prompt=parts[0].kept() if len(parts) > 1 else None,
                answering=context.eligible.copy(),
                conditions=fleet.slots.conditions_now(),
                slots=fleet.slots.now(),
                excluded=frozenset(candidates.excluded),
                comparison=None if candidates.decision is None else candidates.decision.comparison,
            )
        )

    def _record(self, candidates: ScoredCandidates) -> None:
        """Log the inputs of a plan, for replays."""
        request, decision = candidates.request, candidates.decision
        slot, prefill_slot = (candidates.choice.slot, None) if decision is None else decision.slots
        workers = [None if member is None else member.instance.name for member in self.fleet.slots.now()]
        recorded = RecordedDecision(
            request_id=request.request_id,
            model=request.model,
            policy=self._config.policy,
            worker=workers[slot] or "",
            slot=slot,
            prefill_slot=prefill_slot,
            tie=candidates.tie,
            workers=workers,
            context=record_context(candidates.whole_context),
            inputs=None if decision is None else record_inputs(decision.inputs),
            sessions_max=self._config.sessions_max,
            session_idle_s=self._config.session_idle_s,
        )
        _log.debug(EVENT, **msgspec.structs.asdict(recorded))


def _session_key(request: Request) -> str | None:
    """Name a request's session among those of all tenants: none moves another one's, whatever id it guesses."""
    return f"{request.tenant}\0{request.session}" if request.session and request.tenant else request.session


def _output_tokens(request: Request) -> float | None:
    """Give the tokens that the client expects of the answer and that are still to come; None where it expects nothing."""
    expected = request.expected_output_tokens
    if expected is None:
        return None
    return float(max(min(expected, request.sampling.max_tokens) - request.num_emitted, 1))


def _usable_blocks(request: Request, block_size: int) -> int:
    """Count the blocks that a worker may take from its cache: tokens before those whose logprobs are to be reported are computed."""
    sampling = request.sampling
    if sampling.prompt_logprobs is None:
        return len(request.block_hashes) // 16
    return max(sampling.prompt_logprobs_from - 1, 0) // block_size
