"""Whose requests a worker has, and what each frontend hears of the others'."""

import pytest

from penstock.core.ids import RequestId
from penstock.core.types.load import WorkerLoad
from penstock.core.types.requests import Request, SamplingParams
from penstock.core.wire import pack_tokens
from penstock.worker.frontends import Frontends, Prefill


def make_request(name: str, prompt: int = 100, cached: int = 0, known: int | None = None) -> Request:
    return Request(
        request_id=RequestId(name),
        model="tiny",
        token_ids=pack_tokens(range(prompt)),
        sampling=SamplingParams(max_tokens=9),
        expected_cached_tokens=cached,
        known_peer_arrivals=known,
    )


def told(frontends: Frontends, frontend) -> tuple[int, int, int, int]:
    load = frontends.load_for(frontend, WorkerLoad(running_requests=7))
    assert load.running_requests == 7
    assert load.peers == len(frontends.all) - 1
    return load.peer_requests, load.peer_prefill_tokens, load.peer_prefill_pairs, load.peer_arrivals


def two(now_s=lambda: 0.0):
    frontends = Frontends(now_s)
    return frontends, frontends.connect(object()), frontends.connect(object())


def test_the_first_token_ends_the_prefill_and_the_end_the_request():
    frontends, first, second = two()
    running = frontends.take(make_request("a"), first)
    frontends.prefilled(running)
    frontends.prefilled(running)
    assert told(frontends, second) == (1, 0, 0, 1)
    assert not frontends.idle.is_set()
    frontends.forget(RequestId("a"))
    assert frontends.forget(RequestId("a")) is None
    assert told(frontends, second) == (0, 0, 0, 1)
    assert frontends.idle.is_set()
    frontends.check()


@pytest.mark.parametrize(("cached", "expected"), [(-5, 100), (0, 100), (99, 1), (100, 1), (1 << 40, 1)])
def test_an_expectation_that_cannot_be_is_cut(cached, expected):
    frontends, first, _ = two()
    assert frontends.take(make_request("a", cached=cached), first).prefill.tokens == expected


def test_a_router_is_outrun_by_requests_that_it_did_not_know_of():
    frontends, first, second = two()
    assert frontends.unknown_arrivals(make_request("b", known=0), second) == 0
    running = frontends.take(make_request("a"), first)
    assert frontends.unknown_arrivals(make_request("b", known=0), second) == 1
    assert frontends.unknown_arrivals(make_request("b", known=1), second) == 0
    assert frontends.unknown_arrivals(make_request("b"), second) == 0, "it does not say what it knew"
    assert frontends.unknown_arrivals(make_request("b", known=0), first) == 0, "its own are no news to it"
    frontends.prefilled(running)
    assert frontends.unknown_arrivals(make_request("b", known=0), second) == 0, "nothing is left to compute"


def test_a_sum_that_is_off_is_found():
    frontends, first, _ = two()
    frontends.take(make_request("a"), first)
    first.prefill.subtract(Prefill(tokens=1))
    with pytest.raises(AssertionError, match="noted"):
        frontends.check()


def test_everybody_hears_how_long_the_oldest_has_waited_for_its_first_token():
    now = [10.0]
    frontends, first, second = two(lambda: now[0])
    running = [frontends.take(make_request(name), first) for name in "ab"]
    now[0] = 12.5
    frontends.take(make_request("c"), second)
    loads = [frontends.load_for(frontend, WorkerLoad()) for frontend in (first, second)]
    assert [load.oldest_wait_s for load in loads] == [2.5, 2.5]
    frontends.prefilled(running[0])
    assert frontends.load_for(first, WorkerLoad()).oldest_wait_s == frontends.oldest_wait_s() == 2.5
    frontends.forget(RequestId("b"))
    assert frontends.load_for(first, WorkerLoad()).oldest_wait_s == 0.0
    now[0] = 13.0
    assert frontends.load_for(first, WorkerLoad()).oldest_wait_s == 0.5
    frontends.check()
