"""What bodies of other APIs become, kept conversations, and the oldest messages that are left out."""

import json
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import RequestError
from penstock.frontend.apis.bodies import ChatRequest, Message
from penstock.frontend.apis.checks import check_request, offered_tools
from penstock.frontend.apis.dialect import ParsedBody
from penstock.frontend.apis.messages_body import parse_messages
from penstock.frontend.apis.responses_body import parse_responses
from penstock.frontend.apis.responses_store import (
    ENTRY_BYTES,
    RENDERS_MAX,
    ResponseStore,
    SharedResponses,
    answer_room,
    fitting_messages,
    kept_bytes,
    kept_response,
    stored_messages,
    with_items,
)

EXTENSIONS = {
    "top_k": 3,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "min_tokens": 2,
    "ignore_eos": True,
    "stop_token_ids": [7],
    "cache_salt": "s",
    "priority": -1,
    "seed": 5,
}


@pytest.mark.parametrize(
    ("parse", "fields"),
    [
        (parse_responses, {"input": "hello"}),
        (parse_messages, {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 9}),
    ],
)
def test_sampling_fields_of_vllm_reach_the_request(parse, fields: dict) -> None:
    request = parse(json.dumps({"model": "tiny"} | fields | EXTENSIONS).encode()).request
    assert {name: getattr(request, name) for name in EXTENSIONS} == EXTENSIONS


def responses_calls(count: int) -> dict[str, Any]:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    return {"input": [{"role": "user", "content": "hello"}, *[call] * count]}


def anthropic_calls(count: int) -> dict[str, Any]:
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    return {"messages": [{"role": "assistant", "content": [call] * count}], "max_tokens": 9}


@pytest.mark.parametrize(
    ("parse", "fields"), [(parse_responses, responses_calls), (parse_messages, anthropic_calls)]
)
def test_each_of_many_calls_of_one_turn_takes_as_many_steps(
    parse: Callable[[bytes], Any], fields: Callable[[int], dict[str, Any]]
) -> None:
    def steps(count: int) -> int:
        """Count the lines that Python runs."""
        body = json.dumps({"model": "tiny"} | fields(count)).encode()
        lines = 0

        def trace(_frame: object, event: str, _argument: object) -> Any:
            nonlocal lines
            lines += event == "line"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            calls = parse(body).request.messages[-1].tool_calls
        finally:
            sys.settrace(before)
        assert len(calls) == count
        return lines

    first, second = steps(2000) - steps(1000), steps(4000) - steps(3000)
    assert 0 < second < 1.5 * first, "a quadratic time would take three times as many"


def body(*texts: str, instructions: int = 0, stores: bool = True) -> ParsedBody:
    messages = [
        Message(role="system" if index < instructions else "user", content=text)
        for index, text in enumerate(texts)
    ]
    return ParsedBody(ChatRequest(model="m", messages=messages), instructions=instructions, stores=stores)


def contents(parsed: ParsedBody) -> list[object]:
    assert isinstance(parsed.request, ChatRequest)
    return [message.content for message in parsed.request.messages]


def test_a_conversation_goes_between_instructions_and_input() -> None:
    kept = stored_messages(body("rule", "one", instructions=1), b"")
    assert kept is not None
    kept = kept_response(kept_bytes(kept, Message(role="assistant", content="two"), b"{}")).messages
    later = body("other rule", "three", instructions=1)
    again = stored_messages(later, kept)
    assert contents(later) == ["other rule", "one", "two", "three"]
    unkept = body("three", stores=False)
    assert stored_messages(unkept, kept) is None
    assert contents(unkept) == ["one", "two", "three"]
    assert again is not None
    next_turn = body("four")
    stored_messages(next_turn, again)
    assert contents(next_turn) == ["one", "two", "three", "four"]


def test_the_oldest_unused_go_first_and_tenants_have_their_own() -> None:
    store = ResponseStore(bytes_max=25 + 2 * ENTRY_BYTES)
    store.put("a", "r1", bytes(10))
    store.put("a", "r2", bytes(10))
    assert store.get("a", "r1") == bytes(10)
    store.put("a", "r3", bytes(10))  # r2 was used least recently
    store.put("a", "huge", bytes(26 + 2 * ENTRY_BYTES))
    assert store.get("a", "r1") == store.get("a", "r3") == bytes(10)
    for tenant, response_id in (("a", "r2"), ("a", "huge"), ("b", "r1")):
        with pytest.raises(RequestError) as caught:
            store.get(tenant, response_id)
        assert (caught.value.http_status, caught.value.param) == (404, "previous_response_id")


def test_a_tenant_pushes_out_its_own_conversations_and_no_smaller_tenants() -> None:
    store = ResponseStore(bytes_max=20 * (100 + ENTRY_BYTES))
    for number in range(4):
        store.put("quiet", f"q{number}", bytes(100))
        store.put("small", f"s{number}", bytes(10))
    for number in range(1000):
        store.put("flood", f"f{number}", bytes(100))
    for number in range(4):
        assert store.get("quiet", f"q{number}") == bytes(100)
        assert store.get("small", f"s{number}") == bytes(10)
    assert store.get("flood", "f999") == bytes(100)
    with pytest.raises(RequestError):
        store.get("flood", "f0")
    for number in range(20):  # another one that comes later gets as much as the largest
        store.put("late", f"l{number}", bytes(100))
    assert store.get("late", "l19") == bytes(100)
    assert store.get("late", "l15") == bytes(100)
    assert store.get("quiet", "q0") == bytes(100)


def test_a_store_of_many_tenants_stays_within_its_bound() -> None:
    rng = random.Random(3)
    bytes_max = 50 * ENTRY_BYTES
    store = ResponseStore(bytes_max)
    for number in range(20_000):
        tenant = f"t{min(rng.randrange(200), rng.randrange(200))}"
        store.put(tenant, f"r{rng.randrange(30)}", bytes(rng.randrange(300)))
        if number % 100 == 0:
            store.check()


def test_processes_of_one_port_find_each_others_answers(tmp_path: Path) -> None:
    first, second = (
        ResponseStore(25 + 2 * ENTRY_BYTES, SharedResponses(tmp_path, name)) for name in ("one", "two")
    )
    first.put("a", "r1", b"1")
    second.put("a", "r2", b"2")
    assert [store.get("a", name) for store in (first, second) for name in ("r1", "r2")] == [b"1", b"2"] * 2
    with pytest.raises(RequestError):
        second.get("b", "r1")
    second.delete("a", "r1")
    for store in (first, second):
        for gone in (store.get, store.delete):
            with pytest.raises(RequestError) as caught:
                gone("a", "r1")
            assert caught.value.http_status == 404
    for number in range(3, 9):
        first.put("a", f"r{number}", bytes(10))
    assert second.get("a", "r8") == bytes(10)
    with pytest.raises(RequestError):
        second.get("a", "r3")  # the first one had no room for it any longer
    SharedResponses(tmp_path, "one")
    with pytest.raises(RequestError):
        second.get("a", "r8")  # the process has ended, and another one began


def said_by(*items: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    """Give the messages of an input as (role, what it holds)."""
    request = parse_responses(json.dumps({"model": "m", "input": items} | fields).encode()).request
    assert isinstance(request, ChatRequest)
    kept = []
    for message in request.messages:
        calls = [
            (call["function"]["name"], call["function"]["arguments"]) for call in message.tool_calls or ()
        ]
        said = {"content": message.content, "reasoning": message.reasoning_content, "calls": calls}
        kept.append({"role": message.role} | {key: value for key, value in said.items() if value})
    return kept


def item(kind: str, call_id: str = "c1", **fields: Any) -> dict[str, Any]:
    return {"type": kind, "call_id": call_id} | fields


USER = {"role": "user", "content": "hi"}


def thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def test_references_to_items_are_resolved_beside_halves_of_characters_and_have_an_id() -> None:
    item_id = f"msg_{'0' * 24}0"
    kept = kept_bytes(
        b"\x90", Message(role="assistant", content="A"), json.dumps({"output": [{"id": item_id}]}).encode()
    )
    body = rb'{"input": [{"type": "item_reference", "id": %b}, {"content": "\ud83d"}]}'
    sent = json.loads(with_items(body % f'"{item_id}"'.encode(), lambda _: kept))["input"]
    assert sent == [{"id": item_id}, {"content": "\ufffd"}]
    for wrong_id in (b"null", b"5", b"[]"):
        with pytest.raises(RequestError, match=r"input\[0\]\.id: .* an item's id"):
            with_items(body % wrong_id, lambda _: kept)


def test_reasoning_goes_with_what_it_precedes() -> None:
    call = [item("function_call", f"c{number}", name=f"f{number}", arguments="{}") for number in range(3)]
    result = [item("function_call_output", f"c{number}", output=f"o{number}") for number in range(3)]
    answer = {"role": "assistant", "content": "I look."}
    assert said_by(USER, thought("a"), answer, call[0], thought("b"), call[1], call[2], *result, thought("c"), USER) == [
        USER,
        answer | {"reasoning": "a", "calls": [("f0", "{}")]},
        {"role": "tool", "content": "o0"},
        {"role": "assistant", "reasoning": "b", "calls": [("f1", "{}"), ("f2", "{}")]},
        {"role": "tool", "content": "o1"},
        {"role": "tool", "content": "o2"},
        USER,
    ]  # fmt: skip
    told = {
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": "short"}],
        "encrypted_content": "x",
    }
    assert said_by(USER, told, call[0])[1] == {
        "role": "assistant",
        "reasoning": "short",
        "calls": [("f0", "{}")],
    }


@pytest.mark.parametrize(
    ("items", "call", "result"),
    [
        ([item("custom_tool_call", name="patch", input="*** Begin"), item("custom_tool_call_output", output="done")],
         ("patch", '{"input":"*** Begin"}'), "done"),
        ([item("function_call", name="read", namespace="mcp__fs__", arguments='{"a":1}'), item("function_call_output", output="x")],
         ("mcp__fs__read", '{"a":1}'), "x"),
        ([item("local_shell_call", action={"type": "exec", "command": ["ls"]}), item("function_call_output", output="a b")],
         ("local_shell", '{"type":"exec","command":["ls"]}'), "a b"),
        ([item("shell_call", action={"commands": ["ls"]}), item("shell_call_output", output=[{"stdout": "a", "stderr": ""}])],
         ("shell", '{"commands":["ls"]}'), '[{"stdout":"a","stderr":""}]'),
        ([item("apply_patch_call", operation={"path": "a"}), item("apply_patch_call_output", status="completed")],
         ("apply_patch", '{"path":"a"}'), ""),
        ([item("tool_search_call", execution="client", arguments={"query": "x"}), item("tool_search_output", tools=[])],
         ("tool_search", '{"query":"x"}'), "[]"),
        ([item("function_call", name="see", arguments=""), item("function_call_output", output=[{"type": "input_text", "text": "t"}])],
         ("see", ""), "t"),
    ],
)  # fmt: skip
def test_calls_of_every_kind_are_told(
    items: list[dict[str, Any]], call: tuple[str, str], result: str
) -> None:
    left_out = [
        {"type": "web_search_call", "id": "ws_1", "action": {}},
        {"type": "compaction", "encrypted_content": "x"},
    ]
    assert said_by(USER, *left_out, *items) == [
        USER,
        {"role": "assistant", "calls": [call]},
        {"role": "tool"} | ({"content": result} if result else {}),
    ]


def test_tools_of_every_kind_are_functions_or_left_out() -> None:
    function = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: WORD"}
    found = function | {"name": "found"}
    tools = [
        {"type": "web_search", "external_web_access": True},
        function,
        {"type": "custom", "name": "patch", "description": "Edit", "format": grammar},
        {
            "type": "namespace",
            "name": "mcp__fs__",
            "description": "d",
            "tools": [function | {"name": "read"}],
        },
        {"type": "tool_search", "execution": "client", "description": "d", "parameters": {"type": "object"}},
        {"type": "image_generation", "output_format": "png"},
    ]
    choice = {"type": "allowed_tools", "mode": "required", "tools": [
        {"type": "custom", "name": "patch"}, {"type": "function", "name": "read", "namespace": "mcp__fs__"}, {"type": "web_search"},
    ]}  # fmt: skip
    fields = {"model": "m", "tools": tools, "input": [USER, item("tool_search_output", tools=[found, found])]}
    every = parse_responses(json.dumps(fields).encode())
    check_request(every.request, 1)
    names = ["f", "patch", "mcp__fs__read", "tool_search", "found"]
    assert [tool["function"]["name"] for tool in offered_tools(every.request)] == names
    told = offered_tools(every.request)[1]["function"]["parameters"]["properties"]["input"]
    assert told["type"] == "string"
    assert "start: WORD" in told["description"]
    some = parse_responses(json.dumps(fields | {"tool_choice": choice}).encode())
    check_request(some.request, 1)
    assert [tool["function"]["name"] for tool in offered_tools(some.request)] == names[1:3]
    assert some.response is not None
    assert (json.loads(some.response.tools), json.loads(some.response.tool_choice)) == (tools, choice)


CALLED = {"type": "function", "name": "f", "parameters": {}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "functoin", "name": "f", "parameters": {}}]}, "tools[0].type"),
        ({"tools": [{"type": "custom"}]}, "tools[0].name"),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]},
            "tools[0].tools[0].name",
        ),
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        *(
            (
                {"tools": [CALLED], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": tools}},
                "tool_choice",
            )
            for tools in (7, True, 1.5, "f", {"name": "f"})
        ),
        ({"text": {"verbosity": "loud"}}, "text.verbosity"),
        ({"conversation": "conv_1"}, "conversation"),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    def read() -> None:
        parsed = parse_responses(json.dumps({"model": "m", "input": "hi"} | fields).encode())
        with parsed.fields:
            check_request(parsed.request, 1)

    with pytest.raises(RequestError) as caught:
        read()
    assert (caught.value.param, caught.value.message[: len(param)]) == (param, param)


FIXED, OVERHEAD = 7, 4
"""Tokens that a template writes at all, and for each message."""


def said(role: str, tokens: int = 1, **fields: Any) -> Message:
    return Message(role=role, content="x" * tokens, **fields)


def call(*names: str) -> Message:
    return said("assistant", tool_calls=[{"id": name, "type": "function"} for name in names])


def output(name: str, tokens: int = 1) -> Message:
    return said("tool", tokens, tool_call_id=name)


def count_of(message: Message) -> int:
    return len(message.content or "")


def size_of(messages: Sequence[Message]) -> int:
    return FIXED + sum(OVERHEAD + count_of(message) for message in messages)


def fit(messages: Sequence[Message], most: int) -> list[Message]:
    renders = 0

    def counted(some: Sequence[Message]) -> int:
        nonlocal renders
        renders += 1
        return size_of(some)

    kept = fitting_messages(messages, most, counted, count_of)
    assert renders <= RENDERS_MAX + 1
    return kept


def roles(messages: Sequence[Message]) -> list[str]:
    return [f"{message.role[0]}{count_of(message)}" for message in messages]


TALK = [
    said("system", 9),
    said("user", 1),
    said("assistant", 2),
    said("developer", 8),
    said("user", 3),
    said("assistant", 4),
    said("user", 5),
]


def test_the_oldest_are_left_out_until_the_others_fit() -> None:
    whole = size_of(TALK)
    assert fit(TALK, whole) == TALK
    assert roles(fit(TALK, whole - 1)) == ["s9", "a2", "d8", "u3", "a4", "u5"]
    assert roles(fit(TALK, whole - 6)) == ["s9", "d8", "u3", "a4", "u5"]
    assert roles(fit(TALK, 1)) == ["s9", "d8", "u5"]  # they stay, and are refused later


def test_a_call_and_its_outputs_go_together() -> None:
    talk = [said("user"), call("a", "b"), output("b"), said("user", 2), output("a"), said("user", 3)]
    whole = size_of(talk)
    assert roles(fit(talk, whole - 6)) == ["u2", "u3"]
    rounds = [said("user", 9), call("a"), output("a"), call("b"), output("b"), call("c"), output("c")]
    assert fit(rounds, size_of(rounds) - 1) == [rounds[0], *rounds[3:]]
    assert fit(rounds, 1) == [rounds[0], *rounds[5:]]  # what is to be answered stays


def test_what_a_template_refuses_is_made_shorter() -> None:
    def picky(messages: Sequence[Message]) -> int | None:
        return None if messages[0].role != "user" else size_of(messages)

    talk = [said(role) for role in ("user", "assistant", "user", "assistant", "user")]
    assert fitting_messages(talk, size_of(talk) - 1, picky, count_of) == talk[2:]


def test_many_short_messages_that_nobody_counts_are_left_out_no_further_than_needed() -> None:
    """Most of their tokens are the template's, and the size of all of them is not known."""
    talk = [said(role) for role in ("user", "assistant") * 5_000] + [said("user")]

    def short_ones(messages: Sequence[Message]) -> int | None:
        return None if len(messages) > 200 else size_of(messages)

    kept = fitting_messages(talk, size_of(talk[-100:]), short_ones, count_of)
    assert len(kept) == 100


def test_room_is_left_for_the_answer() -> None:
    assert answer_room(50, 512) == 50
    assert answer_room(None, 512) == 128
    assert answer_room(None, 1 << 17) == 1024
    assert answer_room(None, 2) == 1


@given(
    sizes=st.lists(st.tuples(st.sampled_from(["user", "assistant", "system"]), st.integers(0, 300)), max_size=60),
    most=st.integers(1, 5000),
)  # fmt: skip
def test_no_more_is_left_out_than_has_to_be(sizes: list[tuple[str, int]], most: int) -> None:
    talk = [said(role, tokens) for role, tokens in [*sizes, ("user", 3)]]
    kept = fit(talk, most)
    droppable = [message for message in talk[:-1] if message.role != "system"]
    gone = len(talk) - len(kept)
    assert [message for message in kept if message.role != "system"] == [*droppable[gone:], talk[-1]]
    if gone < len(droppable):
        assert size_of(kept) <= most
    if gone:
        assert size_of([*kept, droppable[gone - 1]]) > most
