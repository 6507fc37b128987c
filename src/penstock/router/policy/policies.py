"""How a worker is chosen: each policy prices a request on every worker at once.

Policies are pure functions of `RoutingContext`; write your own against `seams.RoutingPolicy`, and name it as
`user_policy` says. Costs of workers that are not eligible are ignored. What looks random is a hash of the turn,
so that a run repeats.
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
    """Fewest requests running and waiting; among equals, the smallest part of blocks in use."""

    name: ClassVar[str] = "least-loaded"

    def costs(self, context: RoutingContext) -> Costs:
        in_use: Costs = context.active_blocks / np.maximum(context.total_blocks, context.active_blocks + 1)
        in_use += context.running_requests
        in_use += context.waiting_requests
        return in_use


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """Each eligible worker in turn, whatever it does."""

    name: ClassVar[str] = "round-robin"

    def costs(self, context: RoutingContext) -> Costs:
        rank = np.cumsum(context.eligible) - 1
        num_eligible = int(rank[-1]) + 1 if len(rank) else 0
        costs: Costs = ((rank - context.turn) % max(num_eligible, 1)).astype(np.float64)
        return costs


@dataclass(frozen=True, slots=True)
class Random:
    """Any worker, all equally likely."""

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
    """See whether a policy may be called so, without running any code of a user's.

    Raises:
        ConfigError: it may not, or none is installed under this name.
    """
    if name not in POLICIES:
        check_user_policy_name(name, list(POLICIES))


def make_policy(
    name: str, *, sessions_max: int = SESSIONS_MAX, session_idle_s: float = SESSION_IDLE_S
) -> RoutingPolicy:
    """Make a policy by its name: one of `POLICIES`, an entry point's, or `package.module:Class`.

    Args:
        name: of the policy.
        sessions_max: what one that keeps sessions remembers.
        session_idle_s: how long it remembers one without requests.

    Raises:
        ConfigError: there is none of that name, or it cannot be made.
    """
    policy = POLICIES[name]() if name in POLICIES else find_user_policy(name, list(POLICIES))()
    if isinstance(policy, SessionAffinity):
        return replace(policy, sessions_max=sessions_max, idle_s=session_idle_s)
    return policy


def uncached_tokens(context: RoutingContext) -> NDArray[np.int64]:
    """Count the prompt tokens each worker would have to compute: at least 1, for the first output token."""
    cached = context.overlap_blocks.astype(np.int64) * context.block_size
    return np.maximum(context.request_tokens - cached, 1)


def recomputed_blocks(context: RoutingContext, slot: int) -> int:
    """Count the blocks that a worker has in tiers so slow that it computes them again."""
    if context.overlap_blocks[slot] <= context.tier_blocks[0, slot]:
        return 0
    is_slow = ~context.prices.worth_fetching()[:, slot]
    return int(context.tier_blocks[is_slow, slot].sum())


def tie_of(hashes: NDArray[np.uint64], token_ids: bytes, block_size: int) -> int:
    """Give what settles equal prices of a request: 64 bits of its whole prompt, those after the last full block as well.

    Equal requests settle them alike, so that they meet where their prefix will be. Those that only begin alike, as all
    chats of a template do, are spread.

    Args:
        hashes: (n,) uint64 of its full blocks.
        token_ids: packed int32.
        block_size: of the model.
    """
    last = int(hashes[-1]) if len(hashes) else 0
    return last ^ zlib.crc32(token_ids[4 * len(hashes) * block_size :], last & 0xFFFF_FFFF)


def choose(costs: Costs, eligible: NDArray[np.bool_], request_hash: int) -> int | None:
    """Return the cheapest eligible slot, None where there is none; the request's hash, of `tie_of`, breaks ties."""
    return cheapest(costs[None], eligible, request_hash) if eligible.any() else None


def prices_of(terms: Costs, eligible: NDArray[np.bool_]) -> Costs:
    """Return (num_slots,) sums of the (num_terms, num_slots) terms, and infinity where a worker is not eligible."""
    prices: Costs = np.where(eligible, terms[0] if len(terms) == 1 else terms.sum(axis=0), np.inf)
    return prices


def cheapest(terms: Costs, eligible: NDArray[np.bool_], request_hash: int) -> int:
    """Return the eligible slot, of which there is one, with the lowest of `prices_of`; the request's hash breaks ties."""
    if native is None:
        return cheapest_python(terms, eligible, request_hash)
    slot: int = native.cheapest(terms, eligible, request_hash)
    return slot


def cheapest_python(terms: Costs, eligible: NDArray[np.bool_], request_hash: int) -> int:
    """Do what the native `cheapest` does; 10 terms of 8 workers take 9 us, and 1 us there."""
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
