"""Which worker gets a request, and why."""

import asyncio
import math
import random
import zlib
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.core.ids import WorkerId
from penstock.core.radix import PrefixMatch
from penstock.core.types import Request
from penstock.core.wire import num_tokens, unpack_hashes
from penstock.router.config import RouterConfig
from penstock.router.fleet import Fleet
from penstock.router.metrics import RouterMetrics
from penstock.router.policies import Costs, cheapest, prices_of
from penstock.router.worker_pool import WorkerPool
from penstock.seams import ExplainedPolicy, HistoryPolicy, RoutingContext, RoutingPolicy

_DECISIONS_KEPT = 64


class RouteReason(StrEnum):
    """What a decision came to, whatever the policy."""

    ONLY_WORKER = "only_worker"
    NO_PREFIX = "no_prefix"  # nobody holds any of it
    LONGEST_PREFIX = "longest_prefix"  # nobody holds more of it than the chosen one
    SHORTER_PREFIX = "shorter_prefix"  # somebody holds more of it, but cost more


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """One choice, explained: what the chosen worker cost, and the next best one that had a price.

    `terms` and `next_terms` are what both costs are sums of: seconds by name for `kv`, one term for policies that
    do not say.
    """

    request_id: str
    policy: str
    reason: RouteReason
    worker: str
    cost: float
    overlap_blocks: int
    request_blocks: int
    best_overlap_blocks: int
    num_eligible: int
    next_worker: str | None
    next_cost: float | None
    terms: dict[str, float]
    next_terms: dict[str, float]


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request goes, what it will need there, and why."""

    worker_id: WorkerId
    slot: int
    prefill_tokens: int
    cached_tokens: int
    blocks: int
    why: Decision


class Router:
    """Chooses by policy over what the fleet knows. Pure bookkeeping: it sends and waits for nothing."""

    def __init__(
        self, fleet: Fleet, config: RouterConfig, *, metrics: RouterMetrics, rng: random.Random
    ) -> None:
        self.fleet = fleet
        self.policy = config.new_policy()
        self._config = config
        self._has_thresholds = config.busy_kv_share is not None or config.busy_queued_tokens is not None
        self._metrics = metrics
        self._turn = rng.randrange(1 << 16)  # frontends beside each other do not take turns in step
        self._decisions: deque[Decision] = deque(maxlen=_DECISIONS_KEPT)

    @property
    def policy(self) -> RoutingPolicy:
        """What chooses."""
        return self._policy

    @policy.setter
    def policy(self, policy: RoutingPolicy) -> None:
        self._policy = policy
        self._explained = policy if isinstance(policy, ExplainedPolicy) else None
        self._history = policy if isinstance(policy, HistoryPolicy) else None

    def route(self, request: Request, exclude: Collection[WorkerId] = ()) -> Route | None:
        """Choose a worker.

        Args:
            request: with its block hashes.
            exclude: workers that must not get it.

        Returns:
            None where no worker of its model may get it now.
        """
        pool = self.fleet.pools.get(request.model)
        if pool is None:
            return None
        eligible, num_eligible = pool.ready, pool.num_ready
        if exclude:
            eligible = self._without(eligible, exclude)
            num_eligible = int(np.count_nonzero(eligible))
        if num_eligible > 1 and self._has_thresholds:
            eligible = self._without_busy(eligible)
            num_eligible = int(np.count_nonzero(eligible))
        if not num_eligible:
            return None
        hashes = unpack_hashes(request.block_hashes)[::2]
        now_s = asyncio.get_running_loop().time()
        pool.traffic.arrived(now_s)
        context = self._context(request, pool, eligible, self.fleet.tree.match(hashes), now_s)
        terms = self._terms(context)
        prices = prices_of(terms[0] if len(terms) == 1 else terms.sum(axis=0), eligible)
        first = int(hashes[0]) if len(hashes) else zlib.crc32(request.token_ids)
        slot = cheapest(prices, eligible, first)
        if self._history is not None:
            self._history.chosen(context, slot)
        self._turn += 1
        why = self._explain(request.request_id, context, prices, terms, slot=slot, num_eligible=num_eligible)
        overlap_tokens = why.overlap_blocks * context.block_size
        prefill_tokens = max(context.request_tokens - overlap_tokens, 1)
        metrics = self._metrics
        metrics.decided(why.policy, why.reason).inc()
        metrics.prompt_tokens.inc(context.request_tokens)
        metrics.expected_hit_tokens.inc(overlap_tokens)
        return Route(
            worker_id=self.fleet.at(slot).worker_id,
            slot=slot,
            prefill_tokens=prefill_tokens,
            cached_tokens=context.request_tokens - prefill_tokens,
            blocks=context.request_blocks,
            why=why,
        )

    def has_ready(self, model: str) -> bool:
        """Say whether any worker of the model may get requests."""
        pool = self.fleet.pools.get(model)
        return pool is not None and pool.num_ready > 0

    def recent(self) -> Sequence[Decision]:
        """Give the latest decisions, oldest first."""
        return tuple(self._decisions)

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
            own_requests=loads.own_requests,
            own_prefill_tokens=loads.own_prefill_tokens,
            own_prefill_pairs=loads.own_prefill_pairs,
            own_blocks=loads.own_blocks,
            worker_ids=self.fleet.worker_ids,
            session=request.session,
            prices=pool.prices.columns(),
            request_rate_per_s=pool.traffic.rate_per_s(now_s),
            mean_output_tokens=pool.traffic.mean_output_tokens,
            turn=self._turn,
            now_s=now_s,
        )

    def _terms(self, context: RoutingContext) -> NDArray[np.float64]:
        """Price the request: (num_terms, num_slots) whose sums are the costs."""
        if self._explained is None:
            return self._policy.costs(context)[None]
        return self._explained.terms(context)

    def _named(self, terms: NDArray[np.float64]) -> dict[str, float]:
        names = (self._policy.name,) if self._explained is None else self._explained.term_names
        return dict(zip(names, terms.tolist(), strict=True))

    def _explain(
        self,
        request_id: str,
        context: RoutingContext,
        prices: Costs,
        terms: NDArray[np.float64],
        *,
        slot: int,
        num_eligible: int,
    ) -> Decision:
        """Keep why a slot was chosen. `prices` is used up."""
        fleet, cost = self.fleet, float(prices[slot])
        overlaps = context.overlap_blocks * context.eligible
        best, overlap = int(overlaps[overlaps.argmax()]), int(overlaps[slot])
        prices[slot] = np.inf
        following = int(prices.argmin())
        next_cost = float(prices[following])
        if num_eligible == 1:
            reason = RouteReason.ONLY_WORKER
        elif best == 0:
            reason = RouteReason.NO_PREFIX
        else:
            reason = RouteReason.LONGEST_PREFIX if overlap == best else RouteReason.SHORTER_PREFIX
        decision = Decision(
            request_id=request_id,
            policy=self._policy.name,
            reason=reason,
            worker=fleet.at(slot).instance.name,
            cost=cost,
            overlap_blocks=overlap,
            request_blocks=context.request_blocks,
            best_overlap_blocks=best,
            num_eligible=num_eligible,
            next_worker=fleet.at(following).instance.name if next_cost < math.inf else None,
            next_cost=next_cost if next_cost < math.inf else None,
            terms=self._named(terms[:, slot]),
            next_terms=self._named(terms[:, following]) if next_cost < math.inf else {},
        )
        self._decisions.append(decision)
        return decision
