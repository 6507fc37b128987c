"""What a worker could load from others is priced as the cheaper of loading and computing."""

import dataclasses

import numpy as np
import pytest

from penstock.router.links.peer_prices import PRICED_TIER, with_peers
from penstock.router.policy.predicted_seconds import PredictedSeconds, terms_python
from penstock.testing.routing_policy import make_context
from tests.support.kv_pairs import lending, pairs

POLICY = PredictedSeconds()
BLOCK_BYTES = 1 << 20
TOKEN_S = 1e-4


def context_of(device, host=None, stored_token_s=0.0, **columns):
    """Make a context of a prompt of 100 blocks; a token takes TOKEN_S to compute."""
    zeros = [0] * len(device)
    tiers = [device, host or zeros, zeros, columns.pop("stored", zeros)]
    context = make_context(
        len(device),
        request_tokens=1600,
        request_blocks=100,
        overlap_blocks=np.sum(tiers, axis=0).tolist(),
        tier_blocks=tiers,
        **columns,
    )
    onboard = np.zeros_like(context.prices.onboard_token_s)
    onboard[PRICED_TIER] = stored_token_s
    prices = dataclasses.replace(
        context.prices,
        prefill_token_s=np.full(len(device), TOKEN_S),
        prefill_pair_s=np.zeros(len(device)),
        onboard_token_s=onboard,
    )
    return context.changed(prices=prices)


def term(context, name):
    return POLICY.terms(context)[POLICY.term_names.index(name)]


def at_speed(seconds_of):
    """Give seconds per byte for tokens that take so many seconds to load, by (source, reader)."""

    def byte_s(source):
        row = np.full(3, np.inf)
        for (its, reader), seconds in seconds_of.items():
            if its == source:
                row[reader] = seconds * 16 / BLOCK_BYTES
        return row

    return byte_s


THREE = pairs(lending("d0"), lending("d1"), lending("d2"))


def priced(context, speeds, wait_s=None, readers=None):
    """Price what could be loaded: at these speeds, behind loads that take so long."""
    readers = context.eligible if readers is None else readers
    waits = () if wait_s is None else (lambda _source: wait_s,)
    return with_peers(context, THREE, at_speed(speeds), BLOCK_BYTES, *waits, readers=readers)


def test_blocks_of_others_cost_what_loading_them_takes():
    context = context_of([80, 0, 0], [10, 0, 0])
    loads = priced(context, {(0, 1): TOKEN_S / 4})
    assert loads.sources.tolist() == [-1, 0, -1], "nobody has measured the way to the third"
    assert loads.context.overlap_blocks.tolist() == [90, 90, 0]
    saved = term(context, "prefill") - term(loads.context, "prefill")
    assert saved[1] > 0.9 * 90 * 16 * TOKEN_S
    assert term(loads.context, "onboard") == pytest.approx([0, 90 * 16 * TOKEN_S / 4, 0])
    assert saved[[0, 2]].tolist() == [0, 0]
    np.testing.assert_array_equal(POLICY.terms(loads.context), terms_python(loads.context))
    assert context.overlap_blocks.tolist() == [90, 0, 0], "the request's own context is as it was"


@pytest.mark.parametrize("token_s", [TOKEN_S, np.inf])
def test_what_loads_no_sooner_than_it_is_computed_changes_no_price(token_s):
    assert priced(context_of([80, 0, 0]), {(0, 1): token_s, (0, 2): token_s}) is None


def test_what_a_worker_has_itself_counts_before_what_others_have():
    context = context_of([80, 30, 0], stored=[0, 20, 20], stored_token_s=TOKEN_S / 2)
    loads = priced(context, {(0, 1): TOKEN_S / 10, (0, 2): TOKEN_S / 10})
    assert loads.context.overlap_blocks.tolist() == [80, 80, 80]
    stored_s, block_s = 20 * 16 * TOKEN_S / 2, 16 * TOKEN_S / 10
    expected = [0, stored_s + 30 * block_s, stored_s + 60 * block_s]
    assert term(loads.context, "onboard") == pytest.approx(expected)


def test_loads_that_a_worker_serves_already_come_first():
    context, speeds, prompt_s = context_of([80, 0, 0]), {(0, 1): TOKEN_S / 4}, 80 * 16 * TOKEN_S
    loads = priced(context, speeds, wait_s=prompt_s / 8)
    assert term(loads.context, "onboard")[1] == pytest.approx(prompt_s * (1 / 4 + 1 / 8))
    assert priced(context, speeds, wait_s=prompt_s / 2) is None


def test_prefill_workers_load_too_and_what_each_has_itself_is_kept():
    context = context_of([80, 0, 0], eligible=[True, True, False])
    loads = priced(context, {(0, 1): TOKEN_S / 10, (0, 2): TOKEN_S / 10}, readers=np.array([True] * 3))
    assert loads.sources.tolist() == [-1, 0, 0]
    assert loads.context.eligible.tolist() == [True, True, False], "the third answers no request"
    own = loads.own.context(loads.context)
    assert own.overlap_blocks.tolist() == [80, 0, 0]
    np.testing.assert_array_equal(POLICY.terms(own), POLICY.terms(context))
