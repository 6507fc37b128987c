"""The built-in routing policies, and the choice of the cheapest worker.

A policy is a pure function of a `RoutingContext`. Costs of workers that are not eligible are ignored. Random choices are
hashes of the turn, so that runs repeat.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from penstock.core.native import native
from penstock.router.policy.predicted_seconds import PredictedSeconds
from penstock.router.policy.session_affinity import SESSION_IDLE_S, SESSIONS_MAX, SessionAffinity
from penstock.router.policy.user_policy import check_user_policy_name, find_user_policy
from penstock.seams import RoutingContext, RoutingPolicy

Costs = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LeastLoaded:
    """Fewest requests running and waiting; of equals, the smallest share of KV blocks in use."""

    name: ClassVar[str] = "least-loaded"

    def costs(self, context: RoutingContext) -> Costs:
        in_use: Costs = context.active_blocks / np.maximum(context.total_blocks, context.active_blocks + 1)
        in_use += context.running_requests
        in_use += context.waiting_requests
        return in_use


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """Each eligible worker in turn."""

    name: ClassVar[str] = "round-robin"

    def costs(self, context: RoutingContext) -> Costs:
        rank = np.cumsum(context.eligible) - 1
        num_eligible = int(rank[-1]) + 1 if len(rank) else 0
        costs: Costs = ((rank - context.turn) % max(num_eligible, 1)).astype(np.float64)
        return costs


@dataclass(frozen=True, slots=True)
class Random:
    """Any eligible worker, all equally likely."""

    name: ClassVar[str] = "random"

    def costs(self, context: RoutingContext) -> Costs:
        return noise(context.turn, len(context.eligible))


@dataclass(frozen=True, slots=True)
class PowerOfTwo:
    """The less loaded of two random workers: near the best balance from two looks.

    Source: Mitzenmacher, "The power of two choices in randomized load balancing", 2001.
    """

    name: ClassVar[str] = "power-of-two"

    def costs(self, context: RoutingContext) -> Costs:
        drawn = np.where(context.eligible, noise(context.turn, len(context.eligible)), np.inf)
        costs: Costs = np.full(len(drawn), np.inf)
        two = np.argpartition(drawn, 1)[:2] if len(drawn) > 1 else slice(None)
        costs[two] = LeastLoaded().costs(context)[two]
        return costs


POLICIES: dict[str, Callable[[], RoutingPolicy]] = {
    PredictedSeconds.name: PredictedSeconds,
    LeastLoaded.name: LeastLoaded,
    PowerOfTwo.name: PowerOfTwo,
    RoundRobin.name: RoundRobin,
    Random.name: Random,
    SessionAffinity.name: SessionAffinity,
}


def check_policy_name(name: str) -> None:
    """Check a policy's name without importing user code.

    Raises:
        ConfigError: no policy has this name.
    """
    if name not in POLICIES:
        check_user_policy_name(name, list(POLICIES))


def make_policy(
    name: str, *, sessions_max: int = SESSIONS_MAX, session_idle_s: float = SESSION_IDLE_S
) -> RoutingPolicy:
    """Make a policy by its name: one of `POLICIES`, an entry point's, or `package.module:Class`.

    Args:
        name: as `router.policy`.
        sessions_max: most sessions that `session` remembers.
        session_idle_s: how long `session` remembers a session without requests.

    Raises:
        ConfigError: no policy has this name, or it cannot be made.
    """
    policy = POLICIES[name]() if name in POLICIES else find_user_policy(name, list(POLICIES))()
    if isinstance(policy, SessionAffinity):
        return replace(policy, sessions_max=sessions_max, idle_s=session_idle_s)
    return policy


def uncached_tokens(context: RoutingContext) -> NDArray[np.int64]:
    """Count (num_slots,) prompt tokens that each worker would compute; at least 1, for the first output token."""
    cached = context.overlap_blocks.astype(np.int64) * context.block_size
    return np.maximum(context.request_tokens - cached, 1)


def recomputed_blocks(context: RoutingContext, slot: int) -> int:
    """Count cached blocks in tiers so slow that the worker computes them again."""
    if context.overlap_blocks[slot] <= context.tier_blocks[0, slot]:
        return 0
    is_slow = ~context.prices.worth_fetching()[:, slot]
    return int(context.tier_blocks[is_slow, slot].sum())


def tie_of(hashes: NDArray[np.uint64], token_ids: bytes, block_size: int) -> int:
    """Give the hash that settles equal prices: 64 bits of the whole prompt, including tokens after the last full block.

    Equal prompts meet on one worker, where their prefix will be. Prompts that only begin alike, such as chats of one template,
    are spread.

    Args:
        hashes: (n,) uint64 of its full blocks.
        token_ids: packed int32.
        block_size: of the model.
    """
    last = int(hashes[-1]) if len(hashes) else 0
    return last ^ zlib.crc32(token_ids[4 * len(hashes) * block_size :], last & 0xFFFF_FFFF)


def choose(costs: Costs, eligible: NDArray[np.bool_], request_hash: int) -> int | None:
    """Return the cheapest eligible slot, None without one; `request_hash` of `tie_of` breaks ties."""
    return cheapest(costs[None], eligible, request_hash) if eligible.any() else None


def prices_of(terms: Costs, eligible: NDArray[np.bool_]) -> Costs:
    """Return (num_slots,) sums of the (num_terms, num_slots) terms; infinite where not eligible."""
    prices: Costs = np.where(eligible, terms[0] if len(terms) == 1 else terms.sum(axis=0), np.inf)
    return prices


def cheapest(terms: Costs, eligible: NDArray[np.bool_], request_hash: int) -> int:
    """Return the eligible slot with the lowest of `prices_of`; at least one is eligible, and `request_hash` breaks ties."""
    if native is None:
        return cheapest_python(terms, eligible, request_hash)
    slot: int = native.cheapest(terms, eligible, request_hash)
    return slot


def cheapest_python(terms: Costs, eligible: NDArray[np.bool_], request_hash: int) -> int:
    """Reference of the native `cheapest`; 10 terms of 8 workers take 9 us, natively 1 us."""
    prices = prices_of(terms, eligible)
    first = int(prices.argmin())
    ties = ((prices == prices[first]) & eligible).nonzero()[0]
    return int(ties[mix(request_hash) % len(ties)]) if len(ties) else first


def mix(value: int) -> int:
    """Scatter 64 bits.

    Source: Steele, Lea and Flood, SplitMix64's finaliser, 2014.
    """
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFF_FFFF_FFFF_FFFF
    value = (value ^ value >> 27) * 0x94D049BB133111EB & 0xFFFF_FFFF_FFFF_FFFF
    return value ^ value >> 31


def noise(turn: int, num_slots: int) -> Costs:
    """Draw (num_slots,) numbers below 1 that depend on turn and slot only."""
    rng = np.random.Generator(np.random.PCG64(turn))
    return rng.random(num_slots)
