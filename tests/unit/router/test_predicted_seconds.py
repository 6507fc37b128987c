"""Each term of the `kv` policy with numbers worked out by hand, and what must hold for all of them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.router.predicted_seconds import ITL_WEIGHT, PredictedSeconds
from penstock.testing.routing_policy import make_context, make_prices, some_contexts

POLICY = PredictedSeconds()


def term(name: str, **columns: object) -> list[float]:
    terms = POLICY.terms(make_context(**columns))
    return terms[POLICY.term_names.index(name)].tolist()


def test_prefill_is_a_step_its_tokens_and_the_pairs_they_attend_to():
    prices = make_prices(
        prefill_step_s=[0.002] * 3, prefill_token_s=[1e-4, 1e-4, 2e-4], prefill_pair_s=[1e-6] * 3
    )
    # 100 tokens, none cached: 100 * 101 / 2 = 5,050 pairs; 80 cached: 20 * 80 + 20 * 21 / 2 = 1,810 pairs
    assert term("prefill", prices=prices, overlap_blocks=[0, 5, 0]) == pytest.approx(
        [0.002 + 0.01 + 0.00505, 0.002 + 0.002 + 0.00181, 0.002 + 0.02 + 0.00505]
    )


def test_a_step_that_decodes_is_shared_by_the_prompt_tokens_beside_it():
    prices = make_prices(decode_sequence_s=[1e-4] * 3, decode_token_s=[1e-6] * 3, batch_tokens=[100.0] * 3)
    # a step there takes 1 ms + 10 * 0.1 ms + 3,000 * 1 us = 5 ms, of which each of 100 tokens bears 50 us
    found = term("prefill", prices=prices, running_requests=[0, 10, 10], context_tokens=[0, 0, 3000])
    assert found == pytest.approx([100 * (1e-5 + 1e-5), 100 * (1e-5 + 2e-5), 100 * (1e-5 + 5e-5)])


def test_queue_is_what_this_router_sent_and_its_part_of_what_is_reported():
    found = term(
        "queue",
        queued_prefill_tokens=[1000, 1000, 1000],  # a report counts what waits whole
        own_prefill_tokens=[0, 400, 4000],
        running_requests=[4, 2, 2],
        waiting_requests=[0, 2, 0],
        own_requests=[0, 1, 2],
    )
    # all of others; 400 of its own and 3/4 of the rest; its own alone, of which 3,000 are computed by now
    assert found == pytest.approx([1000e-5, (400 + 0.75 * 600) * 1e-5, 1000e-5])


def test_an_expected_length_prices_the_requests_own_answer_alone():
    columns = {
        "total_blocks": [100, 100, 100],
        "active_blocks": [95, 95, 95],
        "running_requests": [2, 2, 2],
        "own_requests": [2, 2, 2],
        "mean_output_tokens": 64.0,
        "request_rate_per_s": 5.0,
        "prices": make_prices(decode_sequence_s=[1e-4] * 3),
    }
    for name in ("slowdown", "kv_pressure"):
        mean, same, short, long = (
            term(name, **columns, output_tokens=tokens)[0] for tokens in (None, 64.0, 8.0, 640.0)
        )
        assert mean == same
        assert short < mean < long
    assert term("kv_pressure", **columns, output_tokens=640.0) == pytest.approx(
        [10 * pressure for pressure in term("kv_pressure", **columns)]
    )
    for name in ("queue", "kv_wait", "prefill", "itl", "queue_externality"):  # matters of others' answers
        assert term(name, **columns, output_tokens=640.0) == term(name, **columns)


def test_kv_wait_is_the_time_in_which_the_lacking_blocks_are_freed():
    columns = {
        "total_blocks": [100, 100, 0],
        "active_blocks": [93, 93, 93],
        "overlap_blocks": [0, 4, 0],
        "mean_output_tokens": 64.0,
    }
    # answers of 64 tokens at 1 ms hold their blocks for 64 ms. Asked: 93 + 7 = 100, all there are
    assert term("kv_wait", **columns) == pytest.approx([0.0, 0.0, 0.0])
    # two that run will have grown by 2 blocks each on average, and 48 queued tokens are 3 more: 107, or 103 with 4 shared
    more = columns | {
        "running_requests": [2, 2, 2],
        "own_requests": [2, 2, 2],
        "queued_prefill_tokens": [48, 48, 48],
    }
    more |= {"own_prefill_tokens": [48, 48, 48]}
    assert term("kv_wait", **more) == pytest.approx([0.07 * 0.064, 0.03 * 0.064, 0.0])


def test_whether_a_tier_is_worth_fetching_from_does_not_go_by_what_runs_there():
    # 10 us to compute a token there, 12 with the decode steps beside it, 11 to fetch it: it is computed
    prices = make_prices(
        batch_tokens=[500.0] * 3, onboard_token_s=[[0.0] * 3, [1e-5] * 3, [1.1e-5] * 3, [1.0] * 3]
    )
    assert prices.worth_fetching().tolist() == [[True] * 3, [True] * 3, [False] * 3, [False] * 3]
    tiers = [[0, 0, 0], [2, 0, 0], [0, 2, 0], [0, 0, 0]]
    columns = {"prices": prices, "overlap_blocks": [2, 2, 0], "tier_blocks": tiers}
    assert term("onboard", **columns) == pytest.approx([32 * 1e-5, 0.0, 0.0])
    assert term("prefill", **columns) == pytest.approx([68 * 1.2e-5, 100 * 1.2e-5, 100 * 1.2e-5])


def test_pace_and_slowdown_weigh_what_is_added_between_tokens():
    prices = make_prices(decode_sequence_s=[1e-4] * 3, decode_token_s=[1e-6] * 3)
    columns = {"prices": prices, "running_requests": [0, 10, 10], "context_tokens": [0, 0, 3000]}
    assert term("itl", **columns) == pytest.approx([ITL_WEIGHT * s for s in (0.001, 0.002, 0.005)])
    # each of ten: 1 ms of prefill over 100 tokens, and in each step one more sequence of 100 + 50 tokens
    each_s = 0.001 / 100 + 1e-4 + 150e-6
    assert term("slowdown", **columns) == pytest.approx([0.0, *[ITL_WEIGHT * 10 * each_s] * 2])


def test_requests_behind_wait_for_this_prefill_as_long_as_the_middle_worker_is_busy():
    columns = {"running_requests": [1, 1, 1], "request_rate_per_s": 300.0}
    # 100 requests a second for each; 1 ms of prefill, and 9 ms before it: busy for twice that, and 2 follow.
    # On the first they would wait less and on the last for hours: they go elsewhere, as all workers but that one are.
    found = term("queue_externality", queued_prefill_tokens=[0, 900, 10**9], **columns)
    assert found == pytest.approx([2 * 0.001] * 3)
    assert term("queue_externality", queued_prefill_tokens=[10**9] * 3, **columns) == pytest.approx(
        [100 * 0.001] * 3
    )


def test_kv_pressure_is_the_wait_of_requests_that_lack_the_held_blocks():
    columns = {"total_blocks": [100, 100, 0], "overlap_blocks": [0, 4, 4], "mean_output_tokens": 64.0}
    # 7 and 3 of 100 blocks for 64 ms; half of all are in use then: to the eighth power, 2 wait if anybody does
    half = term("kv_pressure", active_blocks=[43, 47, 93], **columns)
    assert half == pytest.approx([0.07 * 0.064 * 2 / 256, 0.03 * 0.064 * 2 / 256, 0.0])
    # 10, 6 and no blocks are missing, 6.4, 3.84 and 0 ms; of 100 requests a second, those of twice the median wait as well
    short = term("kv_pressure", active_blocks=[103, 103, 103], request_rate_per_s=300.0, **columns)
    assert short == pytest.approx([0.07 * 0.064 * (2 + 0.768), 0.03 * 0.064 * (2 + 0.768), 0.0])


def test_network_is_there_and_back_and_the_bytes_of_the_prompt():
    prices = make_prices(round_trip_s=[0.0, 0.08, 0.08], byte_s=[0.0, 0.0, 1e-4])
    # 100 tokens of 4 bytes and 7 hashes of 16
    assert term("network", prices=prices) == pytest.approx([0.0, 0.08, 0.08 + 512e-4])


@pytest.mark.parametrize(
    "column",
    ["queued_prefill_tokens", "running_requests", "waiting_requests", "active_blocks", "context_tokens"],
)
def test_more_load_never_costs_less(column):
    for seed in range(5):
        for context in some_contexts(seed):
            before = POLICY.costs(context)
            getattr(context, column)[:] += np.arange(len(before)) % 7
            assert (POLICY.costs(context) >= before * (1 - 1e-12)).all()


@given(st.integers(1, 200_000), st.integers(1, 512), st.integers(0, 100), st.data())
def test_more_overlap_never_costs_more(request_tokens, block_size, context_seed, data):
    context = next(iter(some_contexts(context_seed)))
    context.request_tokens, context.block_size = request_tokens, block_size
    context.request_blocks = -(-request_tokens // block_size)
    full = (request_tokens - 1) // block_size  # one token is computed in any case
    overlaps = sorted(data.draw(st.lists(st.integers(0, full), min_size=2, max_size=2)))
    tier = data.draw(st.integers(0, 3))
    costs = []
    for overlap in overlaps:
        context.overlap_blocks[:] = overlap
        context.tier_blocks[:] = 0
        context.tier_blocks[tier] = overlap
        costs.append(float(POLICY.costs(context)[0]))
    assert costs[1] <= costs[0] * (1 + 1e-12)


def test_targets_say_what_pace_is_worth_within_bounds():
    for ttft_s, itl_s, weight in (
        (2.0, 0.05, 40.0),
        (0.1, 0.2, 1.0),
        (3600.0, 0.001, 100.0),
        (2.0, None, ITL_WEIGHT),
        (None, 0.05, ITL_WEIGHT),
    ):
        assert term("itl", slo_ttft_s=ttft_s, slo_itl_s=itl_s) == pytest.approx([weight * 0.001] * 3)


def test_what_is_past_a_target_counts_again_until_twice_the_target():
    columns = {"queued_prefill_tokens": [0, 1900, 3900], "running_requests": [1, 1, 1]}
    # first tokens after 1, 20 and 40 ms
    assert term("slo_violation", **columns) == [0.0, 0.0, 0.0]
    assert term("slo_violation", slo_ttft_s=0.015, **columns) == pytest.approx([0.0, 0.005, 0.015])
    # steps of 1 ms, with an ITL weight of 5
    assert term("slo_violation", slo_itl_s=0.0008) == pytest.approx([ITL_WEIGHT * 0.0002] * 3)
    assert term("slo_violation", slo_itl_s=0.0001) == pytest.approx([ITL_WEIGHT * 0.0001] * 3)
