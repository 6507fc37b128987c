"""What of streams' time prompts may still take: what is left of it, and what becomes of it."""

import numpy as np
import pytest

from penstock.router.workers.itl_budget import WINDOW_S, ItlBudget
from penstock.testing.routing_policy import make_context, make_prices

STEP_S = 0.01
ALONE = np.zeros(2, dtype=np.int64)


def accounts(share=0.01):
    return ItlBudget(share, 2)


def budget(table, now_s=0.0, peers=ALONE, step_s=STEP_S):
    table.check(2)
    context = make_context(2, now_s=now_s, prices=make_prices(2, decode_step_s=[step_s] * 2))
    return table.budget(context, peers)


def left(table, now_s=0.0, peers=ALONE):
    return budget(table, now_s, peers).left_s.tolist()


def test_where_none_may_be_late_there_is_no_account():
    assert budget(ItlBudget(0.0, 2)) is None


def test_a_late_step_costs_as_many_as_one_of_them_may_be_late():
    assert budget(accounts(0.01)).step_s.tolist() == pytest.approx([1.0, 1.0])
    assert budget(accounts(0.05), step_s=0.1).step_s.tolist() == pytest.approx([2.0, 2.0])
    assert (budget(accounts(), step_s=0.0).step_s > 0).all(), "of workers that say no times, too"


def test_accounts_are_full_at_first():
    found = budget(accounts())
    assert found.left_s.tolist() == found.most_s.tolist() == [WINDOW_S, WINDOW_S]


def test_what_is_spent_comes_back_with_time():
    table = accounts()
    table.spend(1, 4.0, 100.0, peers=0)
    assert left(table, 100.0) == pytest.approx([10, 6])
    assert left(table, 102.0) == pytest.approx([10, 8])
    assert left(table, 104.0) == [10, 10]
    assert left(table, 1e6) == [10, 10], "no more than a window's"


def test_what_an_account_lacks_is_one_window_at_most_or_what_was_spent_at_once():
    table = accounts()
    table.spend(0, 15.0, 0.0, peers=0)
    assert left(table)[0] == pytest.approx(-5)
    for _ in range(10):
        table.spend(0, 9.0, 0.0, peers=0)
    assert left(table)[0] == pytest.approx(-WINDOW_S)
    table.spend(0, 40.0, 0.0, peers=0)
    assert left(table)[0] == pytest.approx(-40)
    assert left(table, 41.0)[0] == pytest.approx(1)


def test_routers_share_what_may_be_late():
    table, peers = accounts(), np.array([0, 3])
    assert left(table, peers=peers) == pytest.approx([10, 2.5])
    assert budget(table, peers=peers).most_s.tolist() == [10, 2.5]
    table.spend(1, 1.0, 0.0, peers=3)
    assert left(table, peers=peers) == pytest.approx([10, 1.5])


def test_who_comes_in_a_worker_s_place_begins_anew():
    table = accounts()
    table.spend(0, 9.0, 0.0, peers=0)
    table.forget(0)
    assert left(table) == [10, 10]


def test_more_slots_keep_what_was_spent():
    table = ItlBudget(0.01, 1)
    table.spend(0, 9.0, 0.0, peers=0)
    table.grow(2)
    assert left(table) == pytest.approx([1, 10])
