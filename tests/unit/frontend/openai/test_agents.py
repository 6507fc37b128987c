"""What bodies say of sessions, and agents' hints, by both names."""

import msgspec
import pytest

from penstock.core.errors import RequestError
from penstock.core.types.requests import KvRetention, SessionAction, SessionControl
from penstock.frontend.openai.agents import AgentOptions, agent_options
from penstock.frontend.openai.answers import encode
from penstock.frontend.openai.bodies import CompletionRequest, parse_chat, parse_completion
from penstock.frontend.responses.translate import parse_responses

OPEN = SessionControl(action=SessionAction.OPEN)


def read(**fields) -> AgentOptions:
    return agent_options(parse_completion(encode({"model": "m", "prompt": "hi", **fields})))


def refusal(**fields) -> RequestError:
    with pytest.raises(RequestError) as caught:
        read(**fields)
    return caught.value


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
    ("fields", "param"),
    [
        ({"session": {"id": "x" * 257}}, "session.id"),
        ({"session": {"id": "a", "action": ""}}, "session.action"),
        ({"session": {"id": "a", "action": "open", "ttl_s": 0}}, "session.ttl_s"),
        ({"session": {"id": "a", "action": "close", "ttl_s": 5}}, "session.ttl_s"),
        ({"session": {"id": "a", "ttl_s": 5}}, "session.ttl_s"),
        ({"session": {"id": "a", "ephemeral": True}}, "session.ephemeral"),
        ({"session": {"id": "a"}, "nvext": {"session_control": {"session_id": "a"}}}, "nvext.session_control"),
        ({"nvext": {"session_control": {"session_id": ""}}}, "nvext.session_control.session_id"),
        ({"nvext": {"session_control": {"session_id": "a", "action": "x"}}}, "nvext.session_control.action"),
        ({"nvext": {"session_control": {"session_id": "a", "timeout": -1}}}, "nvext.session_control.timeout"),
        ({"nvext": {"annotations": ["query_instance_id"]}}, "nvext.annotations"),
        ({"nvext": {"annotations": ["query_instance_id:7"]}}, "nvext.annotations"),
        ({"nvext": {"token_data": [1]}}, "nvext.token_data"),
        ({"nvext": {"top_k": 5}, "top_k": 6}, "nvext.top_k"),
        ({"nvext": {"ignore_eos": "yes"}}, "nvext.ignore_eos"),
        ({"agent_hints": {"priority": 1001}}, "agent_hints.priority"),
        ({"agent_hints": {"osl": 0}}, "agent_hints.osl"),
        ({"agent_hints": {"osl": 1 << 31}}, "agent_hints.osl"),
        ({"agent_hints": {}, "nvext": {"agent_hints": {}}}, "nvext.agent_hints"),
        ({"kv_retention": {}}, "kv_retention"),
        ({"kv_retention": {"priority": 8}}, "kv_retention.priority"),
        ({"kv_retention": {"priority": -9, "ttl_s": 1}}, "kv_retention.priority"),
        ({"kv_retention": {"ttl_s": 0}}, "kv_retention.ttl_s"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_by_its_name(fields, param):
    error = refusal(**fields)
    assert (error.param, error.http_status) == (param, 400)
    assert error.message.startswith(f"{param}: ")


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
