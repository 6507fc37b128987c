"""Where a prompt is computed, with what links are charged for their first use: slot 0 computes prompts, 1 and 2 answer."""

from dataclasses import replace

import numpy as np
import pytest

from penstock.router.config import DisaggConfig
from penstock.router.disagg import DisaggInputs, KvMove, LinkSetup, as_transferred, decide
from penstock.router.fleet.links import KvKinds
from penstock.router.policies import make_policy
from penstock.router.selector import WorkerSelector
from penstock.testing.routing_policy import make_context, make_prices

SELECTOR = WorkerSelector(make_policy("kv"))
DECODE_WORKERS = np.array([False, True, True])
BLOCKS = 6


def context(**columns):
    """100 tokens, which take a second; those who decode hold up ten streams each by it."""
    usual = {"running_requests": [0, 10, 10], "prices": make_prices(prefill_token_s=[0.01] * 3)}
    return make_context(eligible=DECODE_WORKERS.tolist(), **usual | columns)


def inputs(link_s, **config):
    return DisaggInputs(
        prefill_mask=~DECODE_WORKERS,
        prompt_turn=0,
        blocks=BLOCKS,
        block_s=np.full(3, 1e-4),
        setup_s=None if link_s is None else np.array(link_s),
        kinds=KvKinds(
            np.zeros(3, dtype=np.intp), np.zeros(3, dtype=np.intp), np.ones((2, 1, 1), dtype=np.bool_)
        ),
        config=DisaggConfig(**config),
    )


def decided(link_s, asked=None, **config):
    return decide(SELECTOR, asked or context(), 0, inputs(link_s, **config))


def credit(found):
    return LinkSetup(3, SELECTOR).credit(found, 0)


def test_a_charge_beyond_what_is_saved_keeps_a_prompt_and_says_what_that_costs():
    free = decided(None)
    assert (free.comparison.is_remote, free.comparison.link_setup, credit(free)) == (True, 0.0, None)
    found = decided([0.0, 2.0, 2.0])
    assert not found.comparison.is_remote
    assert found.comparison.link_setup == 2.0
    assert found.comparison.remote == pytest.approx(free.comparison.remote + 2.0)
    assert credit(found).source == 0
    assert credit(found).reader in (1, 2)
    assert credit(found).seconds == pytest.approx(free.comparison.local - free.comparison.remote)


def test_a_prompt_past_the_limit_goes_over_a_link_that_is_not_there():
    found = decided([0.0, 2.0, 2.0], local_tokens_max=50)
    assert found.comparison.is_remote
    assert found.comparison.remote > found.comparison.local
    assert (found.comparison.link_setup, credit(found)) == (2.0, None)


def test_engines_whose_decode_workers_compute_no_prompts_are_always_disaggregated():
    cached = context(
        running_requests=[0, 0, 0], overlap_blocks=[0, 7, 7]
    )  # more than the prompt: nothing is left to compute
    assert not decided([0.0, 2.0, 2.0], cached).comparison.is_remote
    assert decided([0.0, 2.0, 2.0], cached).rest is None, "too short to compare"
    found = decide(SELECTOR, cached, 0, replace(inputs([0.0, 2.0, 2.0]), always=True))
    assert found.comparison.is_remote
    assert found.slots[1] == 0
    assert found.rest is not None


def test_targets_do_not_hide_what_is_done_without():
    """Past its target a request's seconds count twice, those of a charge too: it is still told what it costs to stay."""
    asked = context(slo_ttft_s=1.2, slo_itl_s=0.24)
    saved = decided(None, asked).comparison
    found = decided([0.0, 2.0, 2.0], asked)
    assert not found.comparison.is_remote
    assert credit(found).seconds == pytest.approx(saved.local - saved.remote)


def test_who_has_all_of_it_needs_no_link():
    asked = context(overlap_blocks=[0, BLOCKS, 3])
    move = KvMove(0, BLOCKS, np.full(3, 1e-4), DECODE_WORKERS, np.full(3, 2.0))
    network = SELECTOR.term_names.index("network")
    terms = SELECTOR.choose(as_transferred(asked, move), 0).terms[network]
    free = SELECTOR.choose(
        as_transferred(asked, KvMove(0, BLOCKS, move.block_s, DECODE_WORKERS, None)), 0
    ).terms[network]
    assert (terms - free).tolist() == [0.0, 0.0, 2.0], "once, for however many blocks"
    assert [move.charge_s(asked, slot) for slot in range(3)] == [0.0, 0.0, 2.0]


def test_a_request_that_avoids_a_link_for_another_decode_worker_credits_it():
    asked = context(running_requests=[0, 10, 1])
    found = decided([0.0, 0.0, 5.0], asked, local_tokens_max=1)
    free = decided(None, asked, local_tokens_max=1).rest
    assert (found.rest.slot, free.slot) == (1, 2)
    assert (credit(found).source, credit(found).reader) == (0, 2)
    assert credit(found).seconds == pytest.approx(free.prices()[1] - free.prices()[2])
    found = decided([0.0, 0.0, 1e-3], asked, local_tokens_max=1)
    assert found.rest.slot == 2
    assert credit(found) is None
