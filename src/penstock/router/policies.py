"""The built-in routing policies, and the choice of the cheapest worker.

A policy is a pure function of a `RoutingContext`. Costs of workers that are not eligible are ignored. Random choices are
hashes of the turn, so that runs repeat.
"""

import sys
import zlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import ClassVar, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from penstock.core.config import nearest
from penstock.core.errors import ConfigError
from penstock.core.ids import WorkerId
from penstock.core.native import native
from penstock.router.predicted_seconds import PredictedSeconds
from penstock.seams import RoutingContext, RoutingPolicy

SESSIONS_MAX = 65_536
SESSION_IDLE_S = 1800.0
_DEARER_S = 1e-3
"""How much dearer than the session's worker all others are, at least."""


class _Place(NamedTuple):
    worker_id: WorkerId
    last_s: float


@dataclass(frozen=True, slots=True)
class SessionAffinity:
    """The session's worker first, otherwise as `kv`.

    A request without a session, of a new session, or of a session whose worker is not eligible goes where `kv` sends it, and
    the session follows. A session has a prefill worker, too. The term `session` makes all other workers dearer; other terms
    are those of `kv`, and so are waits, disaggregation and explanations. A `seams.HistoryPolicy`; one event loop owns it.
    """

    name: ClassVar[str] = "session"
    term_names: ClassVar[tuple[str, ...]] = (*PredictedSeconds.term_names, "session")
    otherwise: PredictedSeconds = field(default_factory=PredictedSeconds)
    sessions_max: int = SESSIONS_MAX
    """Most sessions remembered, counted again for prefill workers; past it the least recently used is forgotten."""
    idle_s: float = SESSION_IDLE_S
    """How long a session without requests is remembered."""
    _places: OrderedDict[tuple[str, bool], _Place] = field(default_factory=OrderedDict)  # latest used last

    def costs(self, context: RoutingContext) -> NDArray[np.float64]:
        """Return (num_slots,) seconds."""
        costs: NDArray[np.float64] = self.terms(context).sum(axis=0)
        return costs

    def terms(self, context: RoutingContext) -> NDArray[np.float64]:
        """Return (num_terms, num_slots) seconds, named by `term_names`."""
        terms = self.otherwise.terms(context)
        session = np.zeros((1, terms.shape[1]))
        slot = self.slot_of(context)
        if slot is not None:
            costs = terms.sum(axis=0)
            session[0] = np.maximum(costs[slot] - costs, 0.0) + _DEARER_S
            session[0, slot] = 0.0
        return np.concatenate((terms, session))

    def chosen(self, context: RoutingContext, slot: int) -> None:
        places = self._places
        while places and context.now_s - next(iter(places.values())).last_s > self.idle_s:
            places.popitem(last=False)
        if context.session is None:
            return
        key = context.session, context.prompt_only
        places[key] = _Place(WorkerId(int(context.worker_ids[slot])), context.now_s)
        places.move_to_end(key)
        if len(places) > self.sessions_max:
            places.popitem(last=False)

    def check(self) -> None:
        """Raise AssertionError where too much is kept, or in the wrong order."""
        assert len(self._places) <= self.sessions_max, f"{len(self._places)} sessions: past the bound"
        times = [place.last_s for place in self._places.values()]
        assert times == sorted(times), "sessions: the latest used last"

    def slot_of(self, context: RoutingContext) -> int | None:
        """Find the slot of the session's worker, if eligible."""
        if context.session is None:
            return None
        place = self._places.get((context.session, context.prompt_only))
        if place is None or context.now_s - place.last_s > self.idle_s:
            return None
        found = np.flatnonzero(context.eligible & (context.worker_ids == place.worker_id))
        return int(found[0]) if len(found) else None


ENTRY_POINT_GROUP = "penstock.policies"
"""Where an installed package lists its policies."""


def check_user_policy_name(name: str, known: list[str]) -> None:
    """Check a user policy's name without importing its code.

    Args:
        name: as for `find_user_policy`.
        known: names of built-in policies, for the hint in errors.

    Raises:
        ConfigError: neither an installed policy nor of the form `package.module:Class`.
    """
    if ":" not in name:
        _installed(name, known)
        return
    module_name, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), attribute)):
        raise ConfigError(f"policy {name!r}: expected `package.module:Class`")
    package = module_name.split(".")[0]
    if package not in sys.modules and find_spec(package) is None:
        raise ConfigError(
            f"policy {name!r}: there is no module {package!r}; it must be importable by every process that routes (PYTHONPATH)"
        )


def find_user_policy(name: str, known: list[str]) -> Callable[[], RoutingPolicy]:
    """Import a user policy: a class, or any callable without arguments that makes one.

    Args:
        name: `module:Class`, or the name of an entry point of the group `penstock.policies`.
        known: names of built-in policies, for the hint in errors.

    Raises:
        ConfigError: there is no such policy, or its code cannot be imported.
    """
    if ":" in name:
        entry = EntryPoint(name=name, value=name, group=ENTRY_POINT_GROUP)
    else:
        entry = _installed(name, known)
    module_name, _, attribute = entry.value.partition(":")
    try:
        module = import_module(module_name)
    except Exception as error:
        raise ConfigError(
            f"policy {name!r}: {module_name!r} cannot be imported: {error}; expected `package.module:Class`,"
            " importable by every process that routes (PYTHONPATH)"
        ) from error
    found = getattr(module, attribute, None)
    if not callable(found):
        classes = [key for key, value in vars(module).items() if isinstance(value, type)]
        raise ConfigError(f"policy {name!r}: {module_name} has no {attribute!r}{nearest(attribute, classes)}")
    return lambda: _make(name, cast("Callable[[], RoutingPolicy]", found))


def _installed(name: str, known: list[str]) -> EntryPoint:
    installed = {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}
    if name not in installed:
        raise ConfigError(f"policy {name!r} is unknown{nearest(name, [*known, *installed])}")
    return installed[name]


def _make(name: str, make: Callable[[], RoutingPolicy]) -> RoutingPolicy:
    try:
        policy = make()
    except Exception as error:
        raise ConfigError(f"policy {name!r}: it could not be made without arguments: {error}") from error
    lacking = [member for member in ("name", "costs") if not hasattr(policy, member)]
    if lacking:
        raise ConfigError(
            f"policy {name!r}: a {type(policy).__name__} has no {' and no '.join(lacking)}; expected a"
            " penstock.seams.RoutingPolicy"
        )
    return policy


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
