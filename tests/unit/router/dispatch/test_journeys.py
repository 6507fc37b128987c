"""The ways of requests, as people see them: which worker, which part, from when to when."""

import asyncio

import pytest

from tests.support.scene import make_request, scenario, settle


@scenario()
async def test_a_request_under_way_comes_first_and_its_times_grow(cluster, dispatcher, engines):
    async with dispatcher.open(make_request("one-0")) as stream:
        await settle()
        await asyncio.sleep(0.5)
        (journey,) = dispatcher.latest_journeys(9)
        assert (journey.request_id, journey.outcome, journey.cached_tokens) == ("one-0", None, None)
        assert journey.seconds == pytest.approx(0.5)
        (leg,) = journey.legs
        assert (leg.part, leg.first_token_s, leg.ended_s) == ("whole", None, None)
        engines[leg.worker].emit("one-0", 7, cached_tokens=8)
        await anext(stream)
        await asyncio.sleep(0.25)
        (journey,) = dispatcher.journeys("one")
        assert (journey.cached_tokens, journey.output_tokens, journey.prompt_tokens) == (8, 1, 21)
        assert journey.legs[0].first_token_s == pytest.approx(0.5, abs=0.01)
    await asyncio.sleep(1.0)
    (journey,) = dispatcher.latest_journeys(9)
    assert journey.outcome == "cancelled"
    assert journey.seconds == pytest.approx(0.75, abs=0.01)
    assert journey.age_s == pytest.approx(1.75, abs=0.01)
    assert journey.legs[0].ended_s == pytest.approx(0.75, abs=0.01)


@scenario()
async def test_the_latest_are_few_and_the_newest_first(cluster, dispatcher, engines):
    for number in range(300):
        async with dispatcher.open(make_request(f"r{number}")):
            pass
    assert [each.request_id for each in dispatcher.latest_journeys(3)] == ["r299", "r298", "r297"]
    assert len(dispatcher.latest_journeys(1000)) == 256
    assert dispatcher.journeys("r0") == ()
    async with dispatcher.open(make_request("a")), dispatcher.open(make_request("b")):
        assert [each.request_id for each in dispatcher.latest_journeys(3)] == ["b", "a", "r299"]
        assert [each.request_id for each in dispatcher.latest_journeys(1)] == ["b"]
