"""The conformance suite of routing policies. Subclass it and make a policy.

class TestMyPolicy(RoutingPolicySuite):
    def make(self):
        return MyPolicy()
"""

import copy
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.types.events import Tier
from penstock.router.policies import choose
from penstock.seams import ExplainedPolicy, PriceColumns, RoutingContext, RoutingPolicy

_SIZES = (1, 2, 3, 17, 1000)


def make_prices(num_slots: int = 3, **columns: Any) -> PriceColumns:
    """Make prices of workers with 10 us per prompt token and 1 ms per decode step; `columns` override single columns."""
    values: dict[str, Any] = {
        "prefill_token_s": [1e-5] * num_slots,
        "decode_step_s": [1e-3] * num_slots,
        "batch_tokens": [1e9] * num_slots,
        "prompts_at_once": [1.0] * num_slots,
        "batch_requests": [1e9] * num_slots,
        "onboard_token_s": [[0.0] * num_slots] * len(Tier),
    }
    for column in fields(PriceColumns):
        values.setdefault(column.name, [0.0] * num_slots)
    values |= columns
    return PriceColumns(**{name: np.array(value, dtype=np.float64) for name, value in values.items()})


def make_context(num_slots: int = 3, **columns: Any) -> RoutingContext:
    """Make a context of idle workers and a request of 100 tokens; `columns` override single fields."""
    values: dict[str, Any] = {
        "request_tokens": 100,
        "request_blocks": 7,
        "block_size": 16,
        "eligible": [True] * num_slots,
        "total_blocks": [1000] * num_slots,
        "session": None,
        "slo_ttft_s": None,
        "slo_itl_s": None,
        "prices": make_prices(num_slots),
        "request_rate_per_s": 0.0,
        "mean_output_tokens": 100.0,
        "turn": 0,
        "now_s": 0.0,
        "prompt_only": False,
        "output_tokens": None,
    }
    for column in fields(RoutingContext):
        values.setdefault(column.name, [0] * num_slots)
    values |= columns
    if "tier_blocks" not in columns:
        values["tier_blocks"] = [values["overlap_blocks"]] + [[0] * num_slots] * (len(Tier) - 1)
    types = {"eligible": np.bool_, "overlap_blocks": np.int32, "tier_blocks": np.int32}
    return RoutingContext(
        **{
            name: np.array(value, dtype=types.get(name, np.int64)) if isinstance(value, list) else value
            for name, value in values.items()
        }
    )


def some_contexts(seed: int = 0) -> Iterator[RoutingContext]:
    """Generate contexts with few and many workers, idle and full ones, some of them not eligible."""
    rng = np.random.default_rng(seed)
    for num_slots in _SIZES:
        for turn in (0, 1, 5, 1_000_003):
            request_tokens = int(rng.integers(1, 5000))
            request_blocks = -(-request_tokens // 16)
            overlap_blocks = rng.integers(0, request_tokens // 16 + 1, num_slots).astype(np.int32)
            lower = rng.integers(0, overlap_blocks + 1).astype(np.int32) // 2
            tiers = np.stack([overlap_blocks - 2 * lower, lower, lower, 0 * lower])
            total_blocks = rng.integers(0, 2, num_slots) * rng.integers(1, 4000, num_slots)
            yield RoutingContext(
                request_tokens=request_tokens,
                request_blocks=request_blocks,
                block_size=16,
                eligible=rng.random(num_slots) < rng.choice([0.0, 0.3, 1.0]),
                overlap_blocks=overlap_blocks,
                tier_blocks=tiers,
                active_blocks=rng.integers(0, 4000, num_slots),
                cached_blocks=rng.integers(0, 4000, num_slots),
                total_blocks=total_blocks,
                running_requests=rng.integers(0, 300, num_slots),
                waiting_requests=rng.integers(0, 2, num_slots) * rng.integers(0, 1000, num_slots),
                queued_prefill_tokens=rng.integers(0, 100_000, num_slots),
                context_tokens=rng.integers(0, 100_000, num_slots),
                peer_requests=rng.integers(0, 300, num_slots),
                peer_prefill_tokens=rng.integers(0, 100_000, num_slots),
                peer_prefill_pairs=rng.integers(0, 1 << 40, num_slots),
                own_requests=rng.integers(0, 300, num_slots),
                own_prefill_tokens=rng.integers(0, 100_000, num_slots),
                own_prefill_pairs=rng.integers(0, 1 << 40, num_slots),
                own_blocks=rng.integers(0, 9000, num_slots),
                worker_ids=np.arange(1, num_slots + 1),
                session=None if turn % 2 else f"session {turn}",
                slo_ttft_s=None if turn % 2 else float(rng.choice([1e-3, 1.0, 3600.0])),
                slo_itl_s=None if turn == 1 else float(rng.choice([1e-4, 0.05, 60.0])),
                prices=_some_prices(num_slots, rng),
                request_rate_per_s=float(rng.choice([0.0, 0.1, 1000.0])),
                mean_output_tokens=float(rng.choice([1.0, 30.0, 4000.0])),
                turn=turn,
                now_s=float(turn),
                output_tokens=(None, 1.0, 50.0, 9000.0)[turn % 4],
            )


def _some_prices(num_slots: int, rng: np.random.Generator) -> PriceColumns:
    """Generate prices from those of a phone to those of a rack, some of them zero."""

    def some(largest: float) -> NDArray[np.float64]:
        return rng.integers(0, 4, num_slots) * rng.uniform(0.0, largest, num_slots)

    return PriceColumns(
        prefill_step_s=some(0.02),
        prefill_token_s=some(1e-3),
        prefill_pair_s=some(1e-8),
        decode_step_s=some(0.05),
        decode_sequence_s=some(1e-4),
        decode_token_s=some(1e-6),
        batch_tokens=rng.integers(1, 1 << 14, num_slots).astype(np.float64),
        onboard_token_s=np.stack([0.0 * some(1.0), some(1e-5), some(1e-4), some(1e-3)]),
        round_trip_s=some(0.1),
        byte_s=some(1e-8),
        prompts_at_once=(1 + np.arange(num_slots) % 8).astype(np.float64),
        batch_requests=(8.0 ** (1 + np.arange(num_slots) % 9)).astype(np.float64),
    )


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, PriceColumns):
        return all(np.array_equal(getattr(one, c.name), getattr(other, c.name)) for c in fields(one))
    return np.array_equal(one, other)


class RoutingPolicySuite:
    """Defines `seams.RoutingPolicy`."""

    def make(self) -> RoutingPolicy:
        raise NotImplementedError

    def test_it_has_a_name(self) -> None:
        assert self.make().name

    def test_each_slot_gets_a_cost(self) -> None:
        for context in some_contexts():
            costs = self.make().costs(context)
            assert costs.shape == context.eligible.shape
            assert costs.dtype == np.float64

    def test_the_eligible_worker_it_prefers_has_a_finite_cost(self) -> None:
        for context in some_contexts():
            costs = self.make().costs(context)[context.eligible]
            assert not np.isnan(costs).any()
            assert not len(costs) or np.isfinite(costs.min())

    def test_equal_contexts_get_equal_costs_and_stay_unchanged(self) -> None:
        policy = self.make()
        for context in some_contexts():
            before = copy.deepcopy(context)
            costs = policy.costs(context)
            assert np.array_equal(costs, policy.costs(before))
            assert np.array_equal(costs, self.make().costs(context))
            for column in RoutingContext.__slots__:
                assert _equal(getattr(context, column), getattr(before, column)), column

    def test_terms_add_up_to_the_costs(self) -> None:
        policy = self.make()
        if isinstance(policy, ExplainedPolicy):
            for context in some_contexts():
                terms = policy.terms(context)
                assert terms.shape == (len(policy.term_names), len(context.eligible))
                assert np.allclose(terms.sum(axis=0), policy.costs(context))

    def test_the_only_eligible_worker_is_chosen(self) -> None:
        for context in some_contexts():
            context.eligible[:] = False
            assert choose(self.make().costs(context), context.eligible, 1) is None
            slot = len(context.eligible) // 2
            context.eligible[slot] = True
            assert choose(self.make().costs(context), context.eligible, 1) == slot
