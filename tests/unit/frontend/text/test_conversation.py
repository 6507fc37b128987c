"""Conversations that the API allows and a chat template does not take: brought into a form that it takes, or refused."""

from typing import Any

import pytest

from penstock.core.errors import RequestError
from penstock.frontend.text.template import ChatTemplate, short_call_id

SHOWN = (  # of its roles; leaves out others
    "{% for m in messages %}{% for c in m.tool_calls or [] %}({{ c.function.name }}){% else %}"
    "{% if m.role in ('system', 'user', 'assistant', 'tool') %}[{{ m.role[0] }}|{{ m.content }}]{% endif %}{% endfor %}{% endfor %}"
)
FIRST = (  # one system message, at the start; refuses others
    "{% for m in messages %}{% if m.role == 'system' and not loop.first or m.role == 'developer' %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}[{{ m.role[0] }}|{{ m.content | trim }}]{% endfor %}"
)
ONE = (  # shows the first system message, leaves out others and tools'
    "{% if messages[0].role in ('system', 'developer') %}[s|{{ messages[0].content }}]{% endif %}"
    "{% for m in messages if m.role in ('user', 'assistant') %}[{{ m.role[0] }}|{{ m.content }}]{% endfor %}"
)
TURNS = (  # user and assistant in turn, no system message; short ids of calls, arguments as text
    "{% set ns = namespace(turn=0) %}{% for m in messages %}"
    "{% if m.role not in ('user', 'assistant', 'tool') %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if m.role != 'tool' and not m.tool_calls %}{% if (m.role == 'user') != (ns.turn % 2 == 0) or not m.content %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% set ns.turn = ns.turn + 1 %}{% endif %}"
    "{% for c in m.tool_calls or [] %}{% if c.id | length != 9 or loop.length > 1 %}{{ raise_exception('call') }}{% endif %}"
    "({{ c.id + ' ' + c.function.arguments }}){% else %}[{{ m.role[0] }}|{{ m.content }}]{% endfor %}{% endfor %}"
)
FIRST_WITH_TOOLS = (  # with tools the first message is a text, as Llama's
    "{% for m in messages %}{% for c in m.tool_calls if not (tools and loop.first) %}({{ c.function.name }}){% else %}"
    "[{{ m.role[0] }}|{{ m.content }}]{% endfor %}{% endfor %}"
)
FIRST_PART = (  # shows the first part alone
    "{% for m in messages %}[{{ m.role[0] }}|{{ m.content if m.content is string else m.content[0].text }}]{% endfor %}"
)
READS_TOOLS = (  # reads all fields of a tool, and of each of its parameters
    "{% for t in tools %}{{ t.function.name + '|' + t.function.description }}"
    "{% for name, p in t.function.parameters.properties | items %}, {{ name + ' ' + p.description }}"
    "{{ (p.type or 'any') + '' }}{{ p['items'].description + '' if 'items' in p }}{% endfor %}{% endfor %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)


def say(role: str, content: Any = "", **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


S, D, S2 = say("system", "S"), say("developer", "D"), say("system", "S2")
U, U2, A, A2 = say("user", "U"), say("user", "U2"), say("assistant", "A"), say("assistant", "A2")
ID, OTHER_ID = "call_1b2c", "toolu_01A09q90qw90lq917835lq9"
CALL = {"id": ID, "function": {"name": "f", "arguments": {"x": 1}}}
OTHER = {"id": OTHER_ID, "function": {"name": "g", "arguments": {}}}
CALLS = say("assistant", "look", tool_calls=[CALL, OTHER])
RESULT, OTHER_RESULT = say("tool", "R", tool_call_id=ID), say("tool", "R2", tool_call_id=OTHER_ID)
SHORT, OTHER_SHORT = short_call_id(ID), short_call_id(OTHER_ID)


@pytest.mark.parametrize(
    ("template", "messages", "said"),
    [
        (SHOWN, [D, U], "[s|D][u|U]"),
        (SHOWN, [S, D, U, D, A], "[s|S][s|D][u|U][s|D][a|A]"),
        (SHOWN, [U, CALLS, RESULT, OTHER_RESULT], "[u|U][a|look](f)(g)[t|R][t|R2]"),
        (FIRST, [D, U], "[s|D][u|U]"),
        (FIRST, [S, D, S2, U], "[s|S\n\nD\n\nS2][u|U]"),
        (FIRST, [S, U, A, S2, U2], "[s|S][u|U][a|A][u|S2][u|U2]"),
        (ONE, [S, D, U, S2], "[s|S\n\nD][u|U][u|S2]"),
        (ONE, [D, S, U], "[s|D\n\nS][u|U]"),
        (TURNS, [S, U, U2, A, A2], "[u|S\n\nU\n\nU2][a|A\n\nA2]"),
        (TURNS, [S, A, S2], "[u|S][a|A][u|S2]"),
        (TURNS, [A, U], "[u| ][a|A][u|U]"),
        *((FIRST_PART, [U, say(role, [{"type": "text", "text": text} for text in "ABC"])], f"[u|U][{role[0]}|A\nB\nC]")
          for role in ("user", "assistant", "system")),
        (TURNS, [S], "[u|S]"),
        (TURNS, [U, CALLS, OTHER_RESULT, RESULT, U2],
         f'[u|U][a|look][u| ]({SHORT} {{"x": 1}})[t|R]({OTHER_SHORT} {{}})[t|R2][a| ][u|U2]'),
    ],
)  # fmt: skip
def test_a_message_that_the_api_allows_reaches_the_model(
    template: str, messages: list[dict[str, Any]], said: str
) -> None:
    assert ChatTemplate(template, {}).prompt(messages) == said


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ({}, "f|U"),
        ({"description": None, "parameters": None}, "f|U"),
        ({"parameters": {"oneOf": [{"type": "object"}]}}, "f|U"),
        ({"description": "d", "parameters": {"properties": {"x": {"type": ["string", "null"]}, "y": True}}}, "f|d, x any, y anyU"),
        ({"parameters": {"properties": {"x": {"type": "array", "items": True, "description": "e"}}}}, "f|, x earrayU"),
    ],
)  # fmt: skip
def test_a_tool_may_lack_what_a_template_reads(function: dict[str, Any], said: str) -> None:
    tools = [{"type": "function", "function": {"name": "f", **function}}]
    first_call = ChatTemplate(FIRST_WITH_TOOLS, {}).prompt([{**CALLS, "content": ""}], {"tools": tools})
    assert first_call == "[u| ](f)(g)"
    assert ChatTemplate(READS_TOOLS, {}).prompt([U], {"tools": tools}) == said


@pytest.mark.parametrize("content", ["R", "[", "", "U"])
def test_what_has_no_place_in_a_template_is_refused_by_name(content: str) -> None:
    messages = [
        U,
        say("assistant", tool_calls=[CALL]),
        {**RESULT, "content": content},
        say("assistant", "[U"),
    ]
    template = ChatTemplate(ONE, {})
    if not content:
        assert template.prompt(messages)
        return
    with pytest.raises(RequestError, match=r"messages\[2\]: .* leaves out .* role 'tool'") as caught:
        template.prompt(messages)
    assert caught.value.param == "messages[2]"


@pytest.mark.parametrize(
    "content",
    ["  padded\n", 'quotes " and \n breaks', "<think>no</think>yes", [{"type": "text", "text": "part"}]],
)
def test_a_text_may_be_written_otherwise(content: Any) -> None:
    template = ChatTemplate(
        "{% for m in messages %}{{ (m.content if m.content is string else m.content[0].text).split('</think>')[-1]"
        " | trim | tojson }}{% endfor %}",
        {},
    )
    assert template.prompt([U, say("assistant", content), U2])


def test_ids_of_calls_are_mapped_one_way() -> None:
    ids = ["abcdef123", ID, OTHER_ID, "", "ébcdef123", "\ud800"]
    short = [short_call_id(each) for each in ids]
    assert short[0] == ids[0]
    assert len(set(short)) == len(ids)
    assert all(len(each) == 9 and each.isascii() and each.isalnum() for each in short)
    assert short == [short_call_id(each) for each in short]
