"""Reservations: each request counts once, from the decision until its worker's own report."""

import numpy as np
import pytest

from penstock.core.types.load import WorkerLoad
from penstock.router.workers.loads import LoadTracker, Reserved


def report(accepted: int, **figures: int) -> WorkerLoad:
    return WorkerLoad(accepted_requests=accepted, total_blocks=100, **figures)


def test_a_reservation_counts_at_once():
    loads = LoadTracker(2)
    loads.reset(1, total_blocks=64)
    loads.reserve(1, prefill_tokens=40, blocks=3)
    assert loads.running_requests.tolist() == [0, 1]
    assert loads.queued_prefill_tokens.tolist() == [0, 40]
    assert loads.active_blocks.tolist() == [0, 3]
    assert loads.total_blocks.tolist() == [0, 64]
    loads.check()


def test_a_report_replaces_the_reservations_it_includes_and_no_others():
    loads = LoadTracker()
    loads.reserve(0, 40, 3)
    loads.reserve(0, 50, 4)
    loads.report(0, report(1, running_requests=1, active_blocks=3, queued_prefill_tokens=24))
    assert loads.reserved(0) == Reserved(requests=1, prefill_tokens=50, blocks=4)
    assert loads.running_requests.tolist() == [2]
    assert loads.queued_prefill_tokens.tolist() == [74]
    loads.report(0, report(2, running_requests=1, waiting_requests=1, active_blocks=3))
    assert loads.reserved(0) == Reserved(0, 0, 0)
    assert loads.waiting_requests.tolist() == [1]
    loads.check()


def test_an_old_report_keeps_the_reservation():
    loads = LoadTracker()
    loads.reserve(0, 40, 3)
    loads.report(0, report(0, running_requests=5))
    assert loads.running_requests.tolist() == [6]


def test_the_first_token_ends_the_prefill_part_only():
    loads = LoadTracker()
    reservation = loads.reserve(0, 40, 3)
    loads.prefill_done(reservation)
    loads.prefill_done(reservation)
    assert loads.reserved(0) == Reserved(requests=1, prefill_tokens=0, blocks=3)
    loads.check()


@pytest.mark.parametrize("covered", [False, True])
def test_release_is_safe_twice(covered):
    loads = LoadTracker()
    reservation = loads.reserve(0, 40, 3)
    if covered:
        loads.report(0, report(1))
    loads.release(reservation)
    loads.release(reservation)
    loads.prefill_done(reservation)
    assert loads.reserved(0) == Reserved(0, 0, 0)
    assert loads.open_requests(0) == 0
    loads.check()


def test_a_new_connection_counts_from_one_again():
    loads = LoadTracker()
    old = loads.reserve(0, 40, 3)
    loads.report(0, report(1, running_requests=1))
    loads.reserve(0, 40, 3)
    loads.reset(0, total_blocks=8)
    assert loads.load(0) is None
    assert loads.reserved(0) == Reserved(0, 0, 0)
    new = loads.reserve(0, 10, 1)
    loads.release(old)
    loads.report(0, report(1))
    assert new.covered
    loads.check()


def test_slots_grow_and_keep_what_they_have():
    loads = LoadTracker()
    loads.reserve(0, 40, 3)
    loads.grow(3)
    loads.reserve(2, 10, 1)
    assert loads.queued_prefill_tokens.tolist() == [40, 0, 10]
    loads.check()


def test_what_was_sent_counts_whatever_the_reports_say():
    loads = LoadTracker(2)
    first, second = loads.reserve(1, 40, 3), loads.reserve(1, 50, 4)
    loads.report(1, report(2, running_requests=2, cached_blocks=9))
    assert loads.cached_blocks.tolist() == [0, 9]
    loads.prefill_done(first)
    assert loads.own_requests.tolist() == [0, 2]
    assert loads.own_prefill_tokens.tolist() == [0, 50]
    assert loads.own_blocks.tolist() == [0, 7]
    loads.release(first)
    loads.release(second)
    loads.prefill_done(second)
    assert [column[1] for column in (loads.own_requests, loads.own_prefill_tokens, loads.own_blocks)] == [
        0,
        0,
        0,
    ]
    loads.check()


def test_what_a_worker_tells_of_other_routers_replaces_what_it_told_before():
    loads = LoadTracker(2)
    loads.reserve(1, 40, 3)
    assert loads.peer_arrivals(1) is None
    peers = {"peer_requests": 3, "peer_prefill_tokens": 500, "peer_prefill_pairs": 9000}
    assert (
        loads.report(1, report(0, running_requests=3, peer_arrivals=30, **peers)) == 0
    )  # since when, nobody knows
    assert loads.peer_requests.tolist() == [0, 3]
    assert loads.peer_prefill_tokens.tolist() == [0, 500]
    assert loads.peer_prefill_pairs.tolist() == [0, 9000]
    assert loads.running_requests.tolist() == [0, 4]
    assert loads.own_requests.tolist() == [0, 1]
    loads.check()
    assert loads.report(1, report(1, running_requests=2, peer_requests=1, peer_arrivals=32)) == 2
    assert (loads.peer_requests[1], loads.peer_prefill_tokens[1], loads.peer_arrivals(1)) == (1, 0, 32)
    loads.reset(1)
    assert (loads.peer_requests[1], loads.peer_arrivals(1)) == (0, None)
    loads.check()


def test_one_that_is_expected_waits_and_does_not_run():
    loads = LoadTracker()
    expected = loads.reserve(0, 1, 3, 40, is_expected=True)
    assert (loads.running_requests[0], loads.waiting_requests[0], loads.unreported_requests[0]) == (0, 1, 0)
    assert loads.reserved(0) == Reserved(prefill_tokens=1, blocks=3, expected=1)
    loads.check()
    loads.report(0, WorkerLoad(accepted_requests=1, waiting_requests=1))
    assert loads.waiting_requests[0] == 1, "the worker counts it from now on"
    loads.check()
    loads.release(expected)
    other = loads.reserve(0, 1, 3, is_expected=True)
    loads.release(other)
    assert (loads.waiting_requests[0], loads.open_requests(0)) == (1, 0)
    loads.check()


def test_which_workers_have_room_beside_other_tenants_prompts() -> None:
    loads, one = LoadTracker(4), np.ones(4)
    first = loads.reserve(0, 40, 3, tenant="a")
    loads.reserve(1, 40, 3, tenant="a")
    second = loads.reserve(1, 40, 3, tenant="b")
    loads.reserve(2, 0, 3, tenant="a")  # all of it is cached
    assert loads.has_room_beside_others("a", one).tolist() == [False, False, True, True]
    assert loads.has_room_beside_others("b", one).tolist() == [True, False, True, True]
    assert loads.has_room_beside_others("c", one).tolist() == [True, False, True, True]
    assert loads.has_room_beside_others("c", 2 * one).tolist() == [True] * 4
    some = np.array([True, True, False, True])
    assert loads.tokens_by_tenant(some) == {"a": 80, "b": 40}
    assert loads.tokens_by_tenant(~some) == {}, "cached prompts are not computed"
    loads.prefill_done(first)
    loads.release(second)
    loads.check()
    assert loads.tokens_by_tenant(some) == {"a": 40}
    assert loads.has_room_beside_others("a", one).tolist() == [True, False, True, True]
    assert loads.has_room_beside_others("c", one).tolist() == [True] * 4
    loads.release(first)
    loads.check()
