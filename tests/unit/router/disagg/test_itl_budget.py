"""What of streams' time prompts may still take: what is left of it, and what becomes of it."""

import numpy as np
import pytest

from penstock.router.workers.loads import LoadTracker
from penstock.testing.routing_policy import make_context, make_prices
from tests.support.itl_budget import itl_budget

STEP_S = 0.01
ALONE = np.zeros(2, dtype=np.int64)


def accounts(share=0.01, peers=ALONE):
    return itl_budget(share, peers)


def budget(table, now_s=0.0, step_s=STEP_S):
    table.check(2)
    context = make_context(2, now_s=now_s, prices=make_prices(2, decode_step_s=[step_s] * 2))
    return table.override(context)


def left(table, now_s=0.0):
    return budget(table, now_s).left_s.tolist()


def test_a_late_step_costs_as_many_as_one_of_them_may_be_late():
    assert budget(accounts(0.01)).step_s.tolist() == pytest.approx([1.0, 1.0])
    assert budget(accounts(0.05), step_s=0.1).step_s.tolist() == pytest.approx([2.0, 2.0])
    assert (budget(accounts(), step_s=0.0).step_s > 0).all(), "of workers that say no times, too"


def test_routers_share_what_may_be_late():
    table = accounts(peers=np.array([0, 3]))
    assert left(table) == pytest.approx([10, 2.5])
    assert budget(table).most_s.tolist() == [10, 2.5]
    table.spend(1, 1.0, 0.0)
    assert left(table) == pytest.approx([10, 1.5])


def test_more_slots_keep_what_was_spent():
    loads = LoadTracker(1)
    table = itl_budget(0.01, ALONE[:1], loads)
    table.spend(0, 9.0, 0.0)
    loads.grow(2)
    table.grow(2)
    assert left(table) == pytest.approx([1, 10])
