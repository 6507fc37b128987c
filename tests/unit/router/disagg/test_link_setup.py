"""What requests are charged for links over which nothing has moved, and what becomes of it."""

import msgspec
import numpy as np
import pytest

from penstock.router.disagg.link_setup import LinkCredit, LinkSetup
from penstock.router.policy.policies import make_policy
from penstock.router.policy.selector import WorkerSelector
from tests.support.kv_pairs import at, costly, pairs, worker

SELECTOR = WorkerSelector(make_policy("kv"))
SETUPS_S = np.array([0.0, 2.0, 2.0, 1.0])


def links(num_slots=4):
    return LinkSetup(num_slots, SELECTOR)


def charges(table, source=0, setups_s=SETUPS_S, now_s=0.0):
    charge_s = table.charge_s(source, setups_s, now_s)
    table.check(table._num_slots)
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
    table.credit_link(LinkCredit(0, 1, 0.5))
    table.credit_link(LinkCredit(0, 1, 0.25))
    assert charges(table) == [0.0, 1.25, 2.0, 1.0]
    table.credit_link(LinkCredit(0, 1, 1.5))
    assert charges(table) == [0.0, 0.0, 2.0, 1.0], "and no more than there is"


def test_who_comes_while_a_link_is_set_up_waits_for_the_rest_of_it():
    table = links()
    table.credit_link(LinkCredit(0, 1, 1.9))
    table.open(0, 1, 10.0)
    assert charges(table, now_s=10.0) == [0.0, 2.0, 2.0, 1.0], "all of it is still to come"
    table.open(0, 1, 11.0)
    assert charges(table, now_s=11.5) == pytest.approx([0.0, 0.5, 2.0, 1.0])
    assert charges(table, now_s=12.0) == [0.0, 0.0, 2.0, 1.0]
    table.open(0, 2, 12.0)
    table.moved(0, 2)
    assert charges(table, now_s=12.0) == [0.0, 0.0, 0.0, 1.0], "sooner than was said"


def test_a_link_for_which_all_was_credited_still_has_to_be_set_up():
    table = links(2)
    setups_s = np.array([0.0, 2.0])
    table.credit_link(LinkCredit(0, 1, 2.0))
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
    table.credit_link(LinkCredit(0, 1, 1.0))
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


@pytest.mark.parametrize(
    ("here", "there", "seconds"),
    [
        (costly("memory", "shm", "tcp"), costly("memory", "shm", "tcp"), 0.025),
        (costly("tcp"), costly("memory", "shm", "tcp"), 0.1),
        (costly("shm", "nixl"), costly("tcp", "nixl"), 1.0),
        (costly("tcp", "nixl", "shm", host=b"two"), costly("tcp", "nixl", "shm"), 1.0),
        (costly("tcp", "shm", host=b"two"), costly("tcp", "shm"), 0.1),
        (costly("memory"), costly("memory", listens=("memory",)), None),
        (costly("nixl"), costly("tcp"), None),
        (at(), at(), None),
        (None, costly("tcp"), None),
    ],
    ids=["host", "tcp", "nixl-alone", "hosts", "hosts-tcp", "process", "unfit", "unsaid", "no-kv"],
)
def test_a_set_up_takes_what_the_transport_does_that_will_be_used(here, there, seconds):
    found = pairs(worker("p", there), worker("d", here))
    setups_s = links(4).setups_s(found, 0)
    assert (None if setups_s is None else setups_s.tolist()) == (seconds and [0.0, seconds, 0.0, 0.0])


@pytest.mark.parametrize("nonsense", [float("nan"), float("inf"), -1.0])
def test_a_set_up_that_is_no_time_counts_for_nothing(nonsense):
    exchange = msgspec.structs.replace(costly("tcp"), setups_s=(nonsense,))
    found = pairs(worker("p", exchange), worker("d", exchange))
    assert links(2).setups_s(found, 0) is None


def test_set_ups_are_of_those_who_take_prompts_over():
    exchange = costly("tcp")
    found = pairs(worker("p0", exchange), worker("p1", exchange), worker("d0", exchange))
    found.put(3, worker("d1", exchange, layout=None))
    table = links(5)
    setups_s = table.setups_s(found, 0)
    assert setups_s.tolist() == [0.0, 0.0, 0.1, 0.0, 0.0], "d1 keeps no memory for KV"
    assert table.setups_s(found, 0) is setups_s
    found.put(4, worker("d2", costly("tcp", "shm")))
    assert table.setups_s(found, 1).tolist() == [0.0, 0.0, 0.1, 0.0, 0.1]
    assert table.setups_s(found, 7) is None, "nobody is there"
    nothing = pairs(worker("p", exchange, layout=None), worker("d", exchange, layout=None))
    assert links(2).setups_s(nothing, 0) is None, "neither keeps memory for KV: nothing is read"
