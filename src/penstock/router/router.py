"""Which worker gets a request, and why."""

import asyncio
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
from penstock.core.types import ModelCard, Request, Tier
from penstock.core.wire import num_tokens, unpack_hashes
from penstock.router.fleet import Fleet
from penstock.router.metrics import RouterMetrics
from penstock.router.policies import choose
from penstock.seams import HistoryPolicy, RoutingContext, RoutingPolicy

_DECISIONS_KEPT = 64


class RouteReason(StrEnum):
    """What a decision came to, whatever the policy."""

    ONLY_WORKER = "only_worker"
    NO_PREFIX = "no_prefix"  # nobody holds any of it
    LONGEST_PREFIX = "longest_prefix"  # nobody holds more of it than the chosen one
    SHORTER_PREFIX = "shorter_prefix"  # somebody holds more of it, but cost more


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """One choice, explained: what the chosen worker cost, and the next best one."""

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


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request goes, what it will need there, and why."""

    worker_id: WorkerId
    slot: int
    prefill_tokens: int
    blocks: int
    why: Decision


class Router:
    """Chooses by policy over what the fleet knows. Pure bookkeeping: it sends and waits for nothing."""

    def __init__(
        self, fleet: Fleet, policy: RoutingPolicy, *, metrics: RouterMetrics, rng: random.Random
    ) -> None:
        self.fleet = fleet
        self.policy = policy
        self._history = policy if isinstance(policy, HistoryPolicy) else None
        self._metrics = metrics
        self._turn = rng.randrange(1 << 16)  # frontends beside each other do not take turns in step
        self._decisions: deque[Decision] = deque(maxlen=_DECISIONS_KEPT)

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
        eligible = self._eligible(pool.ready, exclude)
        num_eligible = int(np.count_nonzero(eligible))
        if not num_eligible:
            return None
        hashes = unpack_hashes(request.block_hashes)[::2]
        overlaps = self.fleet.tree.match(hashes)
        context = self._context(request, pool.card, eligible, overlaps)
        costs = self.policy.costs(context)
        first = int(hashes[0]) if len(hashes) else zlib.crc32(request.token_ids)
        slot = choose(costs, eligible, first)
        assert slot is not None, f"{num_eligible} workers are eligible"
        if self._history is not None:
            self._history.chosen(context, slot)
        self._turn += 1
        overlap = int(overlaps[slot])
        why = self._explain(request.request_id, context, costs, slot)
        self._metrics.decisions.labels(why.policy, why.reason).inc()
        self._metrics.prompt_tokens.inc(context.request_tokens)
        self._metrics.expected_hit_tokens.inc(overlap * context.block_size)
        return Route(
            worker_id=self.fleet.at(slot).worker_id,
            slot=slot,
            prefill_tokens=max(context.request_tokens - overlap * context.block_size, 1),
            blocks=context.request_blocks,
            why=why,
        )

    def has_ready(self, model: str) -> bool:
        """Say whether any worker of the model may get requests."""
        pool = self.fleet.pools.get(model)
        return pool is not None and bool(pool.ready.any())

    def recent(self) -> Sequence[Decision]:
        """Give the latest decisions, oldest first."""
        return tuple(self._decisions)

    def _eligible(self, ready: NDArray[np.bool_], exclude: Collection[WorkerId]) -> NDArray[np.bool_]:
        eligible = np.zeros(self.fleet.loads.num_slots, dtype=np.bool_)
        eligible[: len(ready)] = ready
        for worker_id in exclude:
            slot = self.fleet.slot_of(worker_id)
            if slot is not None:
                eligible[slot] = False
        return eligible

    def _context(
        self, request: Request, card: ModelCard, eligible: NDArray[np.bool_], overlaps: NDArray[np.int32]
    ) -> RoutingContext:
        loads = self.fleet.loads
        request_tokens = num_tokens(request.token_ids)
        tiers = np.zeros((len(Tier), len(overlaps)), dtype=np.int32)
        tiers[0] = overlaps
        return RoutingContext(
            request_tokens=request_tokens,
            request_blocks=-(-request_tokens // card.block_size),
            block_size=card.block_size,
            eligible=eligible,
            overlap_blocks=overlaps,
            tier_blocks=tiers,
            active_blocks=loads.active_blocks,
            cached_blocks=loads.cached_blocks,
            total_blocks=loads.total_blocks,
            running_requests=loads.running_requests,
            waiting_requests=loads.waiting_requests,
            queued_prefill_tokens=loads.queued_prefill_tokens,
            own_requests=loads.own_requests,
            own_prefill_tokens=loads.own_prefill_tokens,
            own_blocks=loads.own_blocks,
            turn=self._turn,
            now_s=asyncio.get_running_loop().time(),
        )

    def _explain(
        self, request_id: str, context: RoutingContext, costs: NDArray[np.float64], slot: int
    ) -> Decision:
        slots = np.flatnonzero(context.eligible)
        overlaps = context.overlap_blocks[slots]
        best, overlap = int(overlaps.max()), int(context.overlap_blocks[slot])
        others = slots[slots != slot]
        following = int(others[costs[others].argmin()]) if len(others) else None
        if following is None:
            reason = RouteReason.ONLY_WORKER
        elif best == 0:
            reason = RouteReason.NO_PREFIX
        else:
            reason = RouteReason.LONGEST_PREFIX if overlap == best else RouteReason.SHORTER_PREFIX
        decision = Decision(
            request_id=request_id,
            policy=self.policy.name,
            reason=reason,
            worker=self.fleet.at(slot).instance.name,
            cost=float(costs[slot]),
            overlap_blocks=overlap,
            request_blocks=context.request_blocks,
            best_overlap_blocks=best,
            num_eligible=len(slots),
            next_worker=None if following is None else self.fleet.at(following).instance.name,
            next_cost=None if following is None else float(costs[following]),
        )
        self._decisions.append(decision)
        return decision
