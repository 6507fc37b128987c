"""What bodies say of sessions, and agents' hints, by both names."""

import msgspec
import pytest

from penstock.core.types.requests import KvRetention, SessionAction, SessionControl
from penstock.frontend.openai.agents import AgentOptions, agent_options
from penstock.frontend.openai.answers import encode
from penstock.frontend.openai.bodies import CompletionRequest, parse_chat, parse_completion
from penstock.frontend.responses.translate import parse_responses

OPEN = SessionControl(action=SessionAction.OPEN)


def read(**fields) -> AgentOptions:
    return agent_options(parse_completion(encode({"model": "m", "prompt": "hi", **fields})))


def test_a_body_without_them_says_nothing():
    assert read() == read(nvext={}) == read(agent_hints={}) == AgentOptions()


def test_a_session_is_opened_used_and_closed():
    assert read(session={"id": "a", "action": "open"}) == AgentOptions("a", OPEN)
    assert read(session={"id": "a"}) == AgentOptions("a")
    closing = SessionControl(action=SessionAction.CLOSE, is_ephemeral=True)
    assert read(session={"id": "a", "action": "close", "ephemeral": True}).control == closing
    assert read(session={"id": "a", "action": "open", "ttl_s": 1}).control == msgspec.structs.replace(
        OPEN, ttl_s=1
    )


def test_the_peers_names_say_the_same_of_an_ephemeral_session():
    peer = {
        "session_control": {"session_id": "a", "action": "open", "timeout": 30},
        "agent_hints": {"priority": 5},
    }
    control = SessionControl(action=SessionAction.OPEN, ttl_s=30, is_ephemeral=True)
    assert read(nvext=peer) == AgentOptions("a", control, priority=5, retention=KvRetention(priority=5))
    assert read(nvext={"session_control": {"session_id": "a"}, "annotations": ["x"]}) == AgentOptions("a")


@pytest.mark.parametrize(
    ("parse", "about"),
    [
        (parse_completion, {"prompt": "hi"}),
        (parse_chat, {"messages": [{"role": "user", "content": "hi"}]}),
        (lambda body: parse_responses(body).request, {"input": "hi"}),
    ],
    ids=["completion", "chat", "response"],
)
def test_sampling_by_the_peers_names_is_that_of_the_body(parse, about):
    peer = {"ignore_eos": True, "top_k": 7, "repetition_penalty": 1.2, "guided_choice": ["a"]}
    request = parse(encode({"model": "m", "top_k": 7, "nvext": peer | {"greed_sampling": True}, **about}))
    assert {name: getattr(request, name) for name in peer} == peer
    assert request.temperature == 0


def test_retention_is_said_by_itself_or_by_the_requests_priority():
    assert read(kv_retention={"priority": -2}).retention == KvRetention(priority=-2)
    assert read(kv_retention={"ttl_s": 90}).retention == KvRetention(priority=1, ttl_s=90)
    assert read(agent_hints={"priority": -1000}).retention == KvRetention(priority=-8)
    both = read(agent_hints={"priority": 3}, kv_retention={"priority": 0, "ttl_s": 9})
    assert (both.priority, both.retention) == (3, KvRetention(priority=0, ttl_s=9))


def test_the_fields_reach_an_encoded_body():
    body = msgspec.convert(
        {"model": "m", "prompt": "", "session": {"id": "a", "action": "open"}}, CompletionRequest
    )
    assert (
        agent_options(msgspec.msgpack.decode(msgspec.msgpack.encode(body), type=CompletionRequest)).control
        == OPEN
    )
