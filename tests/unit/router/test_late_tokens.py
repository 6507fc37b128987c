"""How many steps of streams prompts may make late: what is left of them, and what becomes of it."""

import numpy as np
import pytest

from penstock.router.late_tokens import WINDOW_S, LateTokens
from penstock.testing.routing_policy import make_context, make_prices

STEP_S = 0.01
ALONE = np.zeros(2, dtype=np.int64)
IN_A_WINDOW = WINDOW_S / STEP_S


def accounts(share=0.01):
    return LateTokens(share, 2)


def at(now_s, **prices):
    return make_context(2, now_s=now_s, prices=make_prices(2, **{"decode_step_s": [STEP_S] * 2} | prices))


def left(table, now_s=0.0, peers=ALONE):
    table.check(2)
    return table.left(at(now_s), peers).tolist()


def test_where_none_may_be_late_nothing_is_counted():
    table = LateTokens(0.0, 2)
    table.spend(0, 1000, at(0.0), ALONE)
    assert table.left(at(0.0), ALONE) is None


def test_at_first_a_window_s_part_is_there():
    assert left(accounts(0.01)) == pytest.approx([0.01 * IN_A_WINDOW] * 2)
    assert left(accounts(0.05)) == pytest.approx([0.05 * IN_A_WINDOW] * 2)


def test_what_is_spent_comes_back_as_further_steps_are_made():
    table = accounts()
    table.spend(1, 4, at(100.0), ALONE)
    assert left(table, 100.0) == pytest.approx([10, 6])
    assert left(table, 102.0) == pytest.approx([10, 8])
    assert left(table, 104.0) == pytest.approx([10, 10])
    assert left(table, 1e6) == pytest.approx([10, 10]), "no more than a window's"


def test_more_than_is_left_is_made_up_for_within_a_window():
    table = accounts()
    table.spend(0, 15, at(0.0), ALONE)
    assert left(table)[0] == pytest.approx(-5)
    table.spend(0, 10_000, at(0.0), ALONE)
    assert left(table)[0] == pytest.approx(-10)
    assert left(table, WINDOW_S + 1)[0] == pytest.approx(1)


def test_routers_share_what_may_be_late():
    table, peers = accounts(), np.array([0, 3])
    assert left(table, peers=peers) == pytest.approx([10, 2.5])
    table.spend(1, 1, at(0.0), peers)
    assert left(table, peers=peers) == pytest.approx([10, 1.5])


def test_slow_steps_are_few():
    assert accounts().left(at(0.0, decode_step_s=[0.1, 0.0]), ALONE).tolist()[0] == pytest.approx(1)


def test_a_worker_that_says_no_times_may_be_late_as_often_as_it_likes():
    table = accounts()
    free = at(0.0, decode_step_s=[0.0, 0.0])
    table.spend(0, 1000, free, ALONE)
    assert np.isfinite(table.left(free, ALONE)).all()
    assert (table.left(free, ALONE) > 1e6).all()


def test_who_comes_in_a_worker_s_place_begins_anew():
    table = accounts()
    table.spend(0, 9, at(0.0), ALONE)
    table.forget(0)
    assert left(table) == pytest.approx([10, 10])


def test_more_slots_keep_what_was_spent():
    table = LateTokens(0.01, 1)
    one = make_context(1, prices=make_prices(1, decode_step_s=[STEP_S]))
    table.spend(0, 9, one, ALONE[:1])
    table.grow(2)
    assert left(table) == pytest.approx([1, 10])
