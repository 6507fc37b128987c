"""Reservations: each request counts once, from the decision until its worker's own report."""

import numpy as np

from penstock.core.types.load import WorkerLoad
from penstock.router.fleet.loads import LoadTracker


def report(accepted: int, **figures: int) -> WorkerLoad:
    return WorkerLoad(accepted_requests=accepted, total_blocks=100, **figures)


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
