"""Blocks that sessions of agents keep: until they close, expire, are displaced or give way."""

import pytest
from msgspec.structs import replace

from penstock.core.errors import RequestError
from penstock.core.types.requests import SessionAction, SessionControl
from penstock.kv.sessions.session import SessionKey
from penstock.testing.engines.probe import make_request
from tests.support.session_scene import CLOSE, OPEN
from tests.support.session_scene import SessionScene as Scene


def test_requests_without_an_action_belong_to_the_session_that_was_opened():
    scene = Scene()
    scene.ask("a", [1, 2], OPEN)
    assert scene.ask("a", [1, 2, 3, 4]) == 2
    scene.flood()
    assert scene.cached([1, 2, 3, 4]) == 4
    scene.ask("b", [1, 9])
    scene.flood(2000)
    assert scene.cached([1, 9]) == 1


def test_closing_lets_the_blocks_go_once_the_last_request_is_done():
    scene = Scene()
    scene.ask("a", [1, 2], OPEN)
    last = scene.begin("a", CLOSE)
    assert len(scene.sessions) == 1
    scene.run(last, [1, 2, 3])
    assert scene.sessions.counts.closed == 1
    scene.flood()
    assert scene.cached([1, 2, 3]) == 0


def test_a_session_expires_after_its_last_request_and_not_during_one():
    scene = Scene(ttl_s=10)
    scene.ask("a", [1], OPEN)
    scene.clock.advance(9)
    request = scene.begin("a")
    scene.clock.advance(100)
    scene.run(request, [1, 2])
    scene.clock.advance(9)
    assert (len(scene.sessions), scene.told) == (1, [])
    scene.clock.advance(2)
    scene.check()
    assert (len(scene.sessions), scene.told) == (0, [1])
    assert scene.sessions.counts.expired == 1


def test_a_clients_ttl_is_bounded():
    scene = Scene(ttl_s=10, ttl_s_max=50)
    scene.ask("a", [1], SessionControl(action=SessionAction.OPEN, ttl_s=40))
    scene.clock.advance(39)
    assert len(scene.sessions) == 1
    with pytest.raises(RequestError, match=r"session\.ttl_s: must be <= 50, sessions\.ttl_s_max, got 51"):
        scene.begin("b", SessionControl(action=SessionAction.OPEN, ttl_s=51))
    assert len(scene.sessions) == 1
    with pytest.raises(RequestError, match=r"^ttl_s: must be <= 50, sessions\.ttl_s_max, got 51"):
        scene.sessions.pin("system", scene.hashes([1]), 51)


def test_past_the_quota_the_session_unused_for_longest_ends():
    scene = Scene(kv_share=0.5)
    for name, first in (("a", 10), ("b", 20)):
        scene.ask(name, [first, first + 1, first + 2, first + 3], OPEN)
    scene.ask("a", [10, 11, 12, 13])
    scene.ask("c", [30, 31], OPEN)
    assert [session.key.name for session in scene.sessions] == ["a", "c"]
    assert scene.sessions.counts.displaced == 1
    assert scene.sessions.counts.pinned_blocks == 6


def test_a_session_larger_than_the_quota_keeps_its_beginning():
    scene = Scene(kv_share=0.25)
    scene.ask("a", [1, 2, 3, 4, 5, 6], OPEN)
    scene.flood()
    assert scene.cached([1, 2, 3, 4, 5, 6]) == 4


def test_a_prefix_that_sessions_share_counts_once():
    scene = Scene(kv_share=0.25)
    scene.ask("a", [1, 2, 3], OPEN)
    scene.ask("b", [1, 2, 4], OPEN)
    assert (len(scene.sessions), scene.sessions.counts.pinned_blocks) == (2, 4)


def test_sessions_are_bounded_in_number():
    scene = Scene(sessions_max=2)
    for name in "abc":
        scene.ask(name, [ord(name)], OPEN)
    assert [session.key.name for session in scene.sessions] == ["b", "c"]
    used = [scene.begin(name) for name in "bc"]
    scene.ask("d", [9], OPEN)  # all others are in use
    assert [session.key.name for session in scene.sessions] == ["b", "c"]
    for request in used:
        scene.run(request, [5])


def test_the_next_turn_replaces_the_answer_that_its_template_writes_otherwise():
    scene = Scene()
    scene.ask("a", [1, 2, 3], OPEN, num_prompt=2)
    scene.ask("a", [1, 2, 4, 5], num_prompt=4)
    assert scene.sessions.counts.pinned_blocks == 4
    scene.ask("a", [8, 9])  # a request beside, such as one for a title
    assert scene.sessions.counts.pinned_blocks == 6
    for first in range(50, 53):
        scene.ask("a", [first])
    assert scene.sessions.counts.pinned_blocks == 5  # four chains: the oldest is dropped
    assert scene.cached([1, 2, 4, 5]) == 4


def test_an_ephemeral_session_leaves_no_trace():
    def others(scene):
        scene.ask(None, [1, 2])
        scene.ask(None, [5, 6])

    def evicted(scene):
        return [scene.pool.make_room(count)[0].block_hashes.tolist() for count in range(13, 17)]

    scene, without = Scene(), Scene()
    others(scene)
    others(without)
    agent = SessionControl(action=SessionAction.OPEN, is_ephemeral=True)
    scene.ask("sub", [20, 21], agent)
    scene.ask("sub", [20, 21, 22, 23], num_prompt=3)
    assert scene.pool.num_cached == 8
    scene.ask("sub", [20, 21, 22, 24, 25], CLOSE)
    assert (scene.pool.num_cached, scene.sessions.counts.closed) == (4, 1)
    assert evicted(scene) == evicted(without)


def test_an_ephemeral_session_frees_only_what_it_computed():
    scene = Scene()
    scene.ask(None, [1, 2])
    scene.ask("sub", [1, 2, 3], SessionControl(action=SessionAction.CLOSE, is_ephemeral=True))
    assert scene.cached([1, 2, 3]) == 2
    user = scene.begin("sub", SessionControl(action=SessionAction.OPEN, is_ephemeral=True))
    scene.run(user, [1, 4])
    held = scene.pool.match(scene.hashes([1, 4]))
    scene.pool.acquire(held)  # another request uses the prefix
    assert scene.sessions.unpin(SessionKey("", "sub"))
    assert scene.cached([1, 4]) == 2
    scene.pool.release(held)
    scene.check()


def test_tenants_do_not_close_each_others_sessions():
    scene = Scene()
    scene.run(scene.begin("a", OPEN, tenant="one"), [1, 2])
    scene.run(scene.begin("a", CLOSE, tenant="two"), [1, 2])
    assert [session.key.tenant for session in scene.sessions] == ["one"]


def test_sessions_give_way_the_idle_ones_first():
    scene = Scene()
    scene.ask("a", [1, 2], OPEN)
    running = scene.begin("a")
    scene.ask("b", [3, 4], OPEN)
    assert scene.sessions.give_way()
    assert [session.key.name for session in scene.sessions] == ["a"]
    assert scene.sessions.give_way()
    assert (scene.sessions.counts.yielded, scene.sessions.counts.pinned_blocks) == (
        1,
        0,
    )  # the other stays open
    assert not scene.sessions.give_way()
    scene.run(running, [1, 2, 3])
    assert scene.sessions.counts.pinned_blocks == 3  # it goes on


def test_an_operators_pin_is_displaced_by_no_session():
    scene = Scene(kv_share=0.25)
    scene.ask(None, [1, 2, 3])
    assert scene.sessions.pin("system", scene.hashes([1, 2, 3, 4]), None) == 3
    scene.ask("a", [5, 6, 7, 8], OPEN)
    assert scene.cached([1, 2, 3]) == 3
    assert scene.sessions.counts.pinned_blocks == 4
    assert scene.sessions.unpin(SessionKey("", "system", is_pin=True))
    assert not scene.sessions.unpin(SessionKey("", "system", is_pin=True))


def test_without_a_share_nothing_is_kept():
    scene = Scene(kv_share=0)
    scene.ask("a", [1, 2], OPEN)
    assert (len(scene.sessions), scene.sessions.counts) == (0, None)
    with pytest.raises(RequestError, match=r"sessions\.kv_share 0"):
        scene.sessions.pin("p", scene.hashes([1]), None)


def test_an_answer_is_kept_for_its_next_turn_and_let_go_when_that_has_come():
    scene = Scene()
    scene.run(scene.begin_speculative(), [1, 2, 3], num_prompt=2)
    scene.flood()
    assert scene.cached([1, 2, 3]) == 3
    assert scene.ask(None, [1, 2, 3, 4]) == 3
    counts = scene.sessions.counts
    assert (counts.open, counts.opened, counts.speculative) == (0, 0, 1)
    assert (counts.speculative_used, counts.speculative_wasted) == (1, 0)
    scene.flood()
    assert scene.cached([1, 2, 3]) == 0


def test_another_tenants_request_is_no_next_turn():
    scene = Scene()
    scene.run(scene.begin_speculative(), [1, 2, 3], num_prompt=2)
    request = replace(make_request("x", [1]), tenant="other")
    scene.sessions.begin(request)
    scene.run(request, [1, 2, 3, 4])
    counts = scene.sessions.counts
    assert (counts.open, counts.speculative_used) == (1, 0)


def test_what_is_kept_for_a_next_turn_ends_first():
    scene = Scene(kv_share=0.25, ttl_s=10)
    scene.ask("a", [1, 2], OPEN)
    scene.run(scene.begin_speculative(), [5, 6])
    scene.ask("b", [7, 8], OPEN)
    assert [session.key.name for session in scene.sessions] == ["a", "b"]
    scene.sessions.unpin(SessionKey("", "b"))
    scene.run(scene.begin_speculative(), [5, 6])
    assert scene.sessions.end_speculative()
    assert not scene.sessions.end_speculative()
    assert [session.key.name for session in scene.sessions] == ["a"]
    scene.run(scene.begin_speculative(), [5, 6])
    scene.clock.advance(11)
    counts = scene.sessions.counts
    assert (counts.open, counts.speculative, counts.speculative_wasted) == (0, 3, 3)
    assert (counts.displaced, counts.yielded, counts.expired) == (0, 0, 1)  # those of sessions
