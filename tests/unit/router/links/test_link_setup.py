"""What requests are charged for links over which nothing has moved, and what becomes of it."""

import numpy as np
import pytest

from penstock.router.links.link_setup import LinkCredit, LinkSetupCost

SETUPS_S = np.array([0.0, 2.0, 2.0, 1.0])


def links(num_slots=4):
    return LinkSetupCost(num_slots)


def charges(table, source=0, setups_s=SETUPS_S, now_s=0.0):
    charge_s = table.charge_s(source, setups_s, now_s)
    table.check()
    return None if charge_s is None else charge_s.tolist()


def test_nobody_is_charged_where_set_ups_take_no_time():
    assert charges(links(), setups_s=None) is None


def test_the_first_use_of_each_link_is_charged():
    assert charges(links()) == [0.0, 2.0, 2.0, 1.0]


def test_a_link_that_has_moved_bytes_is_used_for_nothing():
    table = links()
    table.moved(0, 1)
    assert charges(table) == [0.0, 0.0, 2.0, 1.0]
    assert charges(table, source=1) == [0.0, 2.0, 2.0, 1.0], "another one's are as they were"
    table.moved(0, 2)
    table.moved(0, 3)
    assert charges(table) is None
    assert charges(table) is None, "as before"


def test_what_requests_do_without_is_taken_off():
    table = links()
    table.forgo(LinkCredit(0, 1, 0.5))
    table.forgo(LinkCredit(0, 1, 0.25))
    assert charges(table) == [0.0, 1.25, 2.0, 1.0]
    table.forgo(LinkCredit(0, 1, 1.5))
    assert charges(table) == [0.0, 0.0, 2.0, 1.0], "and no more than there is"


def test_who_comes_while_a_link_is_set_up_waits_for_the_rest_of_it():
    table = links()
    table.forgo(LinkCredit(0, 1, 1.9))
    table.open(0, 1, 10.0)
    assert charges(table, now_s=10.0) == [0.0, 2.0, 2.0, 1.0], "all of it is still to come"
    table.open(0, 1, 11.0)
    assert charges(table, now_s=11.5) == pytest.approx([0.0, 0.5, 2.0, 1.0])
    assert charges(table, now_s=12.0) == [0.0, 0.0, 2.0, 1.0]
    table.open(0, 2, 12.0)
    table.moved(0, 2)
    assert charges(table, now_s=12.0) == [0.0, 0.0, 0.0, 1.0], "sooner than was said"


def test_a_link_for_which_all_was_foregone_still_has_to_be_set_up():
    table = links(2)
    setups_s = np.array([0.0, 2.0])
    table.forgo(LinkCredit(0, 1, 2.0))
    assert charges(table, setups_s=setups_s) is None
    table.open(0, 1, 10.0)
    assert charges(table, setups_s=setups_s, now_s=10.5) == [0.0, 1.5]
    assert charges(table, setups_s=setups_s, now_s=12.0) is None
    table.open(0, 1, 13.0)
    assert charges(table, setups_s=setups_s, now_s=13.0) is None, "it was opened before"


@pytest.mark.parametrize("gone", [0, 1])
def test_who_takes_the_place_of_one_that_is_gone_has_no_links(gone):
    table = links(2)
    setups_s = np.array([0.0, 2.0])
    table.moved(0, 1)
    assert charges(table, setups_s=setups_s) is None
    table.forget(gone)
    assert charges(table, setups_s=setups_s) == [0.0, 2.0]
    table.forgo(LinkCredit(0, 1, 1.0))
    table.forget(gone)
    assert charges(table, setups_s=setups_s) == [0.0, 2.0]


def test_other_workers_have_other_set_ups():
    table = links(2)
    table.moved(0, 1)
    assert charges(table, setups_s=np.array([0.0, 2.0])) is None
    assert charges(table, setups_s=np.array([3.0, 2.0])) == [3.0, 0.0], (
        "slot 0 came, and is no prefill worker"
    )


def test_there_are_as_many_as_slots():
    table = links(2)
    table.moved(0, 1)
    assert charges(table, setups_s=np.array([0.0, 2.0])) is None
    table.grow(4)
    assert charges(table) == [0.0, 0.0, 2.0, 1.0]
