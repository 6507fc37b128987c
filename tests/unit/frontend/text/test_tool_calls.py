"""What models of each family write, and what is read from it; however the text is split, the same."""

# ruff: noqa: RUF001, ISC004 - marks as models write them
import itertools
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.frontend.text.parser import OutputFormat, OutputParser, ParserPlan, format_of, known_format
from penstock.frontend.text.source import Parsed
from penstock.frontend.text.template import ChatTemplate

SCHEMAS: dict[str, Any] = {
    "weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "now": {},
    "f": {},
}
TEMPLATES = {
    "hermes": "<tool_call> <think>",
    "qwen3-coder": "<tool_call> <function= <think>",
    "json": '"parameters": dictionary of argument name and its value',
    "pythonic": "[func_name1(params_name1=params_value1)]",
    "mistral": "[TOOL_CALLS] [THINK]",
    "deepseek": "<｜tool▁call▁begin｜>",
    "harmony": "<|start|>assistant<|channel|>",
}
PARIS, ROME = '{"city": "Paris", "days": 3}', '{"city": "Rome"}'
Calls = list[tuple[str, str]]
CASES: list[tuple[str, str, str, str, Calls]] = [
    # family, text, reasoning, content, calls
    ("hermes", "just text, with < and {", "", "just text, with < and {", []),
    ("hermes", f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>', "", "", [("weather", PARIS)]),
    (
        "hermes",
        f'<think>\nhm\n</think>\n\nLet me see.\n<tool_call>{{"name": "weather", "arguments": {PARIS}}}</tool_call>\n'
        f'<tool_call>{{"arguments": {ROME}, "name": "weather"}}</tool_call>',
        "hm\n",
        "Let me see.",
        [("weather", PARIS), ("weather", ROME)],
    ),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", "", [("now", "{}")]),
    ("hermes", '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>', "", "", [("now", '{"a": 1}')]),
    ("hermes", '<tool_call>{"nom": 1}</tool_call> after', "", '{"nom": 1} after', []),
    ("hermes", "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>", "", "", [("weather", PARIS)]),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "a}\\"</tool_call>"}}</tool_call>', "", "", [("weather", '{"city": "a}\\"</tool_call>"}')]),
    ("json", f'{{"name": "weather", "parameters": {PARIS}}}; {{"name": "now", "parameters": {{}}}}', "", "", [("weather", PARIS), ("now", "{}")]),
    ("json", f'<|python_tag|>{{"name": "weather", "parameters": {PARIS}}}', "", "", [("weather", PARIS)]),
    ("json", "{not json} at all", "", "{not json} at all", []),
    ("json", "plain", "", "plain", []),
    ("pythonic", "[weather(city='Paris', days=3), now()]", "", "", [("weather", PARIS), ("now", "{}")]),
    ("pythonic", "<|python_start|>[weather(city=\"Ro'me)\")]<|python_end|>", "", "", [("weather", '{"city": "Ro\'me)"}')]),
    ("pythonic", "[1] says so", "", "[1] says so", []),
    ("pythonic", "[weather(x)] is no call", "", "[weather(x)] is no call", []),
    ("mistral", f'[TOOL_CALLS][{{"name": "weather", "arguments": {PARIS}}}, {{"name": "now", "arguments": {{}}}}]', "", "", [("weather", PARIS), ("now", "{}")]),
    ("mistral", f"[THINK]hm[/THINK]Well[TOOL_CALLS]weather[ARGS]{PARIS}[TOOL_CALLS]now{{}}", "hm", "Well", [("weather", PARIS), ("now", "{}")]),
    ("mistral", f"[TOOL_CALLS]weather[CALL_ID]123456789[ARGS]{ROME}", "", "", [("weather", ROME)]),
    (
        "deepseek",
        f"<think>hm</think>So<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{PARIS}\n```<｜tool▁call▁end｜>\n"
        f"<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{ROME}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "hm",
        "So",
        [("weather", PARIS), ("weather", ROME)],
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Hello",
        "hm",
        "Hello",
        [],
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json"
        f"<|message|>{PARIS}<|call|>",
        "hm",
        "",
        [("weather", PARIS)],
    ),
    ("harmony", f" to=functions.weather<|channel|>commentary<|message|>{ROME}", "", "", [("weather", ROME)]),
    # arguments are an object, whatever the model writes
    *(("hermes", f'<tool_call>{{"name": "now", "arguments": {written}}}</tool_call>', "", "", [("now", "{}")])
      for written in ("null", '""', "[]", '"null"', '"Paris"', "5", "[1]", "", " ")),
    ("hermes", "<tool_call>{\"name\": \"weather\", \"arguments\": {'city': 'Paris', 'days': 3}}</tool_call>", "", "", [("weather", PARIS)]),
    ("hermes", f'<tool_call>{{"name": "weather", "arguments": {PARIS[:-1]}</tool_call>Well', "", "Well", [("weather", PARIS)]),
    ("mistral", "[TOOL_CALLS]now[ARGS]null[TOOL_CALLS]now[ARGS][TOOL_CALLS]now", "", "", [("now", "{}")] * 3),
    ("deepseek", "<｜tool▁call▁begin｜>now<｜tool▁sep｜>null<｜tool▁call▁end｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n```<｜tool▁call▁end｜>", "", "", [("now", "{}")] * 2),
    ("harmony", "<|channel|>commentary to=functions.now <|message|><|call|>", "", "", [("now", "{}")]),
    ("qwen3-coder", "<tool_call><function=now></function></tool_call>", "", "", [("now", "{}")]),
    ("hermes", '<tool_call>{"name": "now"}\n{"name": "now"}</tool_call>', "", "", [("now", "{}")] * 2),
    ("mistral", "[TOOL_CALLS] begins a call", "", "[TOOL_CALLS] begins a call", []),
    ("deepseek", "<｜tool▁call▁begin｜>no name<｜tool▁call▁end｜> so", "", "no name so", []),
    # what nothing announces is a call only with a declared name, and nothing but a call's keys
    ("json", '{"name": "Ann", "age": 3} is she', "", '{"name": "Ann", "age": 3} is she', []),
    ("json", '{"name": "now", "age": 3}', "", '{"name": "now", "age": 3}', []),
    ("json", '{"parameters": {}, "name": "Ann"}', "", '{"parameters": {}, "name": "Ann"}', []),
    ("json", '<|python_tag|>{"name": "Ann"}', "", "", [("Ann", "{}")]),
    ("json", 'I look.<|python_tag|>{"name": "now"}', "", "I look.", [("now", "{}")]),
    ("pythonic", "[print(x=1), now()]", "", "[print(x=1), now()]", []),
    ("pythonic", "<|python_start|>[print(x=true)]<|python_end|>", "", "", [("print", '{"x": true}')]),
    # a call ends open reasoning, and no mark of reasoning is the user's
    ("hermes", '<think>plan <tool_call>{"name": "now"}</tool_call></think>', "plan ", "", [("now", "{}")]),
    ("hermes", "<think>no <tool_call> yet</think>Use <tool_call> here", "no <tool_call> yet", "Use <tool_call> here", []),
    ("hermes", "<think>a</think>b <think>c</think>d</think> e<think>f", "acf", "b d e", []),
    ("hermes", "<think>a<think>b</think>c", "ab", "c", []),
    ("qwen3-coder", "<think>plan <function=now></function></tool_call>", "plan ", "", [("now", "{}")]),
    ("deepseek", "<think>plan<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜></think>so", "plan", "so", [("now", "{}")]),
    ("mistral", "[THINK]plan[TOOL_CALLS]now{}[/THINK]so", "plan", "so", [("now", "{}")]),
    # Qwen3-Coder without some of its tags
    ("qwen3-coder", "<function=weather><parameter=city>Paris<parameter=days>3</tool_call>Well", "", "Well", [("weather", PARIS)]),
    ("qwen3-coder", "<tool_call><function=weather>\n<parameter=city\nParis\n</parameter>\n<parameter=days>3</function><tool_call><function=now></function>", "", "", [("weather", PARIS), ("now", "{}")]),
    ("qwen3-coder", f"<function=\nweather>{PARIS}</function>", "", "", [("weather", PARIS)]),
    # without a name nothing is called
    ("qwen3-coder", "<function=></function>", "", "<function=></function>", []),
    ("hermes", "<tool_call><function=", "", "", []),
    ("deepseek", "<｜tool▁call▁begin｜><｜tool▁sep｜>{}<｜tool▁call▁end｜>", "", "{}", []),
    # recipients that are no functions
    ("harmony", "<|start|>functions.now to=assistant<|channel|>commentary<|message|>noon<|end|><|start|>assistant<|channel|>final<|message|>It is noon.", "noon", "It is noon.", []),
    ("harmony", " to=assistant<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=now<|channel|>commentary<|message|>{}<|call|>", "", "I look.", [("now", "{}")]),
    ("harmony", "<|channel|>commentary<|message|>I look.<|start|>assistant<|channel|>final<|message|>So.", "", "I look.\nSo.", []),
    # text around a call is kept apart
    *(("hermes", f'I look.{before}<tool_call>{{"name": "now"}}</tool_call>{after}So.', "", f"I look.{between}So.", [("now", "{}")])
      for before, after, between in (("", "", "\n"), ("\n\n", "", "\n\n"), ("", " ", " "), ("\n", "\n", "\n"))),
    ("harmony", "no channel<|channel|>final<|message|>at first", "", "no channelat first", []),
]  # fmt: skip


def plan(family: str, **options: Any) -> ParserPlan:
    return ParserPlan(**{"format": format_of(TEMPLATES[family]), "tools": SCHEMAS, **options})


def gather(pieces: list[Parsed]) -> tuple[str, str, Calls]:
    calls: Calls = []
    for piece in pieces:
        for call in piece.calls:
            if call.name is not None:
                assert call.index == len(calls)
                calls.append((call.name, ""))
            name, arguments = calls[call.index]
            calls[call.index] = (name, arguments + call.arguments)
    return "".join(piece.reasoning for piece in pieces), "".join(piece.content for piece in pieces), calls


def read(how: ParserPlan, texts: list[str], *, is_cut: bool = False) -> tuple[str, str, Calls]:
    parser = OutputParser(how)
    return gather([*(parser.feed(text) for text in texts), parser.finish(is_cut=is_cut)])


def split(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:end] for start, end in itertools.pairwise(places)]


@pytest.mark.parametrize("family", TEMPLATES)
def test_the_family_is_told_by_the_template(family: str) -> None:
    found: OutputFormat = format_of(TEMPLATES[family])
    assert found.family == family


@pytest.mark.parametrize(("family", "text", "reasoning", "content", "calls"), CASES)
def test_reasoning_content_and_calls(
    family: str, text: str, reasoning: str, content: str, calls: Calls
) -> None:
    assert read(plan(family), [text]) == (reasoning, content, calls)
    assert read(plan(family), list(text)) == (reasoning, content, calls)


@given(
    case=st.sampled_from(CASES),
    cuts=st.lists(st.integers(0, 400), max_size=12),
    length=st.integers(0, 400),
    is_cut=st.booleans(),
)
def test_any_split_gives_the_same_even_of_a_text_that_breaks_off(
    case: tuple[Any, ...], cuts: list[int], length: int, is_cut: bool
) -> None:
    text = case[1][:length]
    whole = read(plan(case[0]), [text], is_cut=is_cut)
    assert read(plan(case[0]), split(text, cuts), is_cut=is_cut) == whole


MARKS = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "<|channel|>", "<|message|>", "<|start|>",
     "<|end|>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<function=", "<parameter=", '{"name": "now"', "{", "}", "[", "]",
     '"arguments": ', '"', "\\", ":", ",", "now(", ")", "a='", "'", "\n", " ", "\\u12", "\x01", "True", "7", ">", "x>", "</function>", "</parameter>", "analysis", " to=functions.now", "é", "name"]
)  # fmt: skip


@given(
    family=st.sampled_from(sorted(TEMPLATES)),
    marks=st.lists(MARKS, max_size=25),
    cuts=st.lists(st.integers(0, 300), max_size=10),
    is_cut=st.booleans(),
)
def test_any_text_is_read_alike_however_it_is_split_and_whole_calls_have_an_object(
    family: str, marks: list[str], cuts: list[int], is_cut: bool
) -> None:
    text = "".join(marks)
    whole = read(plan(family), [text], is_cut=is_cut)
    assert read(plan(family), split(text, cuts), is_cut=is_cut) == whole
    parser = OutputParser(plan(family))
    parser.feed(text)
    parser.finish(is_cut=is_cut)
    for _, arguments in whole[2][: len(whole[2]) - parser.cuts_call]:
        assert isinstance(json.loads(arguments), dict)


@given(
    text=st.text(st.characters(exclude_characters="<["), max_size=200),
    family=st.sampled_from(["hermes", "mistral"]),
)
def test_text_without_marks_is_the_users(text: str, family: str) -> None:
    assert read(plan(family), list(text)) == ("", text, [])


def test_white_space_within_text_after_a_call_stays_wherever_it_is_split() -> None:
    text = '{"name": "now", "parameters": {}}; It is late, ok'
    for at in range(len(text)):
        assert read(plan("json"), [text[:at], text[at:]]) == ("", "It is late, ok", [("now", "{}")])


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("escape", ["\\", "\\u", "\\u00e", "\\\\\\"])
@pytest.mark.parametrize(
    ("family", "before"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": '),
        ("json", '{"name": "f", "parameters": '),
        ("mistral", "[TOOL_CALLS]f[ARGS]"),
        ("deepseek", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>"),
        ("harmony", "<|channel|>commentary to=functions.f<|message|>"),
    ],
)
def test_the_beginning_of_an_escape_is_no_text_where_an_answer_ends_in_it(
    family: str, before: str, escape: str, is_cut: bool
) -> None:
    text = before + '{"a": "x' + escape
    for texts in ([text], list(text)):
        _, content, calls = read(plan(family), texts, is_cut=is_cut)
        assert (content, [name for name, _ in calls]) == ("", ["f"])


def test_arguments_come_as_they_are_written() -> None:
    parser = OutputParser(plan("hermes"))
    assert parser.feed('<tool_call>{"name": "weather", ').calls[0].name == "weather"
    assert parser.feed('"arguments": {"city"').calls[0].arguments == '{"city"'
    assert parser.feed(': "Par').calls[0].arguments == ': "Par'
    assert parser.num_calls == 1


@pytest.mark.parametrize(
    ("family", "text", "call"),
    [
        (
            "hermes",
            '<tool_call><function=f><parameter=a>"\\ud800é"</parameter><parameter=b>NaN</parameter><parameter=c>1e999'
            "</parameter></function></tool_call>",
            ("f", '{"a": "\\ud800é", "b": "NaN", "c": "1e999"}'),
        ),
        ("hermes", r'<tool_call>{"name": "\ud800", "arguments": {}}</tool_call>', (r"\ud800", "{}")),
        ("json", r'{"name": "f", "parameters": "{\"a\": \"\udfff\"}"}', ("f", r'{"a": "\udfff"}')),
        ("pythonic", r"[f(a='\ud800')]", ("f", r'{"a": "\ud800"}')),
    ],
)
def test_what_json_or_utf_8_has_not_becomes_text(family: str, text: str, call: tuple[str, str]) -> None:
    _, _, calls = read(plan(family), [text])
    assert calls == [call]
    assert json.loads(call[1]) is not None
    assert msgspec.json.encode(calls)


def test_a_list_whose_first_word_is_too_long_for_a_name_is_given_out_as_it_comes() -> None:
    parser = OutputParser(plan("pythonic"))
    assert "".join(parser.feed(text).content for text in ["[", *["word"] * 100]) == "[" + "word" * 100
    longest = plan("pythonic", tools={"f" * 256: {}})
    assert read(longest, ["[" + "f" * 256 + "(a=1)]"])[2] == [("f" * 256, '{"a": 1}')]


TWO_CALLS = f'[{{"name": "weather", "parameters": {PARIS}}}, {{"parameters": {{}}, "name": "now"}}]'


@pytest.mark.parametrize(("how", "text"), [({"required": True}, TWO_CALLS), ({"named": "weather"}, PARIS)])
def test_of_forced_calls_that_are_cut_nothing_becomes_text(how: dict[str, Any], text: str) -> None:
    whole = read(plan("json", **how), [text])[2]
    for length in range(len(text)):
        for texts in ([text[:length]], list(text[:length])):
            _, content, calls = read(plan("json", **how), texts, is_cut=True)
            assert content == "", text[:length]
            assert [name for name, _ in calls] == [name for name, _ in whole[: len(calls)]]
            for (_, arguments), (_, all_of_it) in zip(calls, whole, strict=False):
                assert all_of_it.startswith(arguments)


THINKS = {"in_reasoning": True, "tools": None}
SECOND_CUT = f'{{"name": "weather", "parameters": {PARIS}}}; {{"na'
TAGS_CUT = "<tool_call><function=weather><parameter=city>Paris</parameter><parameter=days>1"


@pytest.mark.parametrize(
    ("family", "options", "is_cut", "text", "read_as"),
    [
        ("hermes", THINKS, False, "hm, so</think>\n\nyes", ("hm, so", "yes", [])),
        ("hermes", THINKS | {"shows_reasoning": False}, False, "hm</think>yes", ("", "yes", [])),
        ("pythonic", {"calls_max": 1}, False, "[now(), weather(city='Rome')]", ("", "", [("now", "{}")])),
        ("json", {"required": True}, False, TWO_CALLS, ("", "", [("weather", PARIS), ("now", "{}")])),
        ("json", {"named": "weather"}, False, PARIS, ("", "", [("weather", PARIS)])),
        ("json", {"required": True}, False, "No tool fits.", ("", "No tool fits.", [])),
        ("json", {"required": True}, True, "No tool fits.", ("", "No tool fits.", [])),
        ("json", {"required": True}, False, '[{"nom": 1}]', ("", '{"nom": 1}', [])),
        # a second call that is cut is dropped, and so is a first one whose name is not whole
        ("json", {}, True, SECOND_CUT, ("", "", [("weather", PARIS)])),
        ("pythonic", {}, True, "[weather(city='Paris', days=3), now(x='a", ("", "", [("weather", PARIS)])),
        ("hermes", {}, True, 'Well.<tool_call>{"name": "weath', ("", "Well.", [])),
        ("hermes", {}, True, "Well.<tool_call><function=weath", ("", "Well.", [])),
        ("json", {}, True, '<|python_tag|>{"name": "weath', ("", "", [])),
        ("json", {}, True, '<|python_tag|>{"parameters": {"city": "Paris"}, "na', ("", "", [])),
        ("pythonic", {}, True, "[weather(city='Par", ("", "", [])),
        ("mistral", {}, True, 'Well.[TOOL_CALLS][{"name": "weath', ("", "Well.", [])),
        ("mistral", {}, True, "Well.[TOOL_CALLS]weath", ("", "Well.", [])),
        ("deepseek", {}, True, "Well.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weath", ("", "Well.", [])),
        ("deepseek", {}, True, "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weath", ("", "", [])),
        ("harmony", {}, True, " to=functions.weath", ("", "", [])),
        ("harmony", {}, True, "<|start|>assistant to=functions.weath", ("", "", [])),
        # what no mark announces is the user's, and tagged arguments that are cut are left open
        ("json", {}, True, '{"name": "Ann', ("", '{"name": "Ann', [])),
        ("hermes", {}, True, TAGS_CUT, ("", "", [("weather", '{"city": "Paris"')])),
        ("hermes", {}, False, '<tool_call>{"name": "weather", "arguments": {"city": "Par', ("", "", [("weather", '{"city": "Par')])),
        ("hermes", {}, False, TAGS_CUT, ("", "", [("weather", '{"city": "Paris", "days": 1}')])),
    ],
)  # fmt: skip
def test_plans_and_texts_that_are_cut(
    family: str, options: dict[str, Any], is_cut: bool, text: str, read_as: tuple[str, str, Calls]
) -> None:
    for texts in ([text], list(text)):
        assert read(plan(family, **options), texts, is_cut=is_cut) == read_as


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("{'a': 'it\\'s \"x\"', 'b': True, 'c': None}", {"a": 'it\'s "x"', "b": True, "c": None}),
        ('{"a": "1\n2\t", "b": "\\d\\u12 \\n"}', {"a": "1\n2\t", "b": "\\d\\u12 \n"}),
        ('{"a": [1, 2,], "b": 3,}', {"a": [1, 2], "b": 3}),
        ('{"a": 1 "b": ["1" 2], , c: Paris,}', {"a": 1, "b": ["1", 2], "c": "Paris"}),
        ('{"a" 1, "b":, "c"}', {"a": 1, "b": None, "c": None}),
        ('{"a": [1}, "b": {"c": 2]}', {"a": [1], "b": {"c": 2}}),
        ('{"a": {"b": [1, </tool_call>', {"a": {"b": [1]}}),
        ('{"a":\u00a01\u00a0,\u2028"b"\u3000: "\u2028"\x0b"c": x\u2028}', {"a": 1, "b": "\u2028", "c": "x"}),
        ('{"a": 01, "b": .5, "c": NaN, "d": -1.5e3}', {"a": "01", "b": ".5", "c": "NaN", "d": -1500.0}),
    ],
)
def test_arguments_are_valid_json_however_they_are_written(written: str, value: Any) -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {written}}}</tool_call>'
    for cut in range(len(text)):
        ((_, arguments),) = read(plan("hermes"), [text[:cut], text[cut:]])[2]
        assert json.loads(arguments) == value
    ((_, arguments),) = read(
        plan("hermes"), [f'<tool_call>{{"arguments": {json.dumps(written)}, "name": "f"}}']
    )[2]
    assert json.loads(arguments) == value


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


@given(
    value=st.dictionaries(st.text(), JSON, max_size=4),
    indent=st.sampled_from([None, 2]),
    ascii_only=st.booleans(),
)
def test_valid_arguments_stay_as_they_are(value: Any, indent: int | None, ascii_only: bool) -> None:
    written = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    text = f'<tool_call>{{"name": "f", "arguments": {written}}}</tool_call>'
    for texts in ([text], list(text)):
        assert read(plan("hermes"), texts)[2] == [("f", written)]


@pytest.mark.parametrize(
    ("text", "is_cut", "cuts_call", "repairs"),
    [
        (f'<tool_call>{{"name": "weather", "arguments": {PARIS[:9]}', True, True, ["cut"]),
        (f'<tool_call>{{"name": "weather", "arguments": {PARIS[:9]}', False, True, ["cut"]),
        (f'<tool_call>{{"name": "weather", "arguments": {PARIS[:-1]}', True, True, ["cut"]),
        (f'<tool_call>{{"name": "weather", "arguments": {PARIS[:-1]}', False, False, ["tag"]),
        (f'<tool_call>{{"name": "weather", "arguments": {PARIS}', True, False, []),
        ('<tool_call>{"name": "weather"', True, True, ["cut"]),
        ('<tool_call>{"name": "weather", "arguments": nul', True, True, ["cut"]),
        ('<tool_call>{"name": "weather", "arguments": 5}', True, False, ["arguments"]),
        ("<think>hm<tool_call><function=now>", True, True, ["reasoning", "cut"]),
    ],
)
def test_a_call_is_whole_or_cut_and_what_was_mended_is_said(
    text: str, is_cut: bool, cuts_call: bool, repairs: list[str]
) -> None:
    for texts in ([text], list(text)):
        parser = OutputParser(plan("hermes"))
        gather([*map(parser.feed, texts), parser.finish(is_cut=is_cut)])
        assert (parser.cuts_call, parser.repairs) == (cuts_call, repairs)


def test_without_tools_and_reasoning_no_parser_is_needed() -> None:
    assert not plan("json", tools=None).is_needed
    assert plan("harmony", tools=None).is_needed
    assert plan("hermes", tools=None).is_needed  # it may reason


def test_arguments_of_tags_have_the_types_of_the_schema() -> None:
    text = "<tool_call><function=weather><parameter=city>12</parameter><parameter=days>12</parameter></function></tool_call>"
    (call,) = read(plan("hermes"), [text])[2]
    assert json.loads(call[1]) == {"city": "12", "days": 12}


STRING, NULL, INTEGER = {"type": "string"}, {"type": "null"}, {"type": "integer"}
DEFINED: dict[str, Any] = {
    "name": STRING,
    "loop": {"$ref": "#/$defs/loop"},
    "size": {"anyOf": [INTEGER, NULL]},
}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        *(({"anyOf": [STRING, NULL]}, text, value) for text, value in (("12345", "12345"), ("null", None), ('"a"', '"a"'))),
        ({"oneOf": [STRING, NULL]}, "1.5", "1.5"),
        ({"allOf": [STRING, {"minLength": 1}]}, "true", "true"),
        ({"type": ["string", "null"]}, "007", "007"),
        ({"type": ["string", "null"]}, "7", "7"),
        ({"type": "string", "nullable": True}, "[1]", "[1]"),
        ({"$ref": "#/$defs/name"}, "5", "5"),
        ({"$ref": "#/$defs/size"}, "5", 5),
        ({"$ref": "#/$defs/size"}, "None", None),
        ({"$ref": "#/$defs/loop"}, "5", 5),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": ["1", "2"]}, "3", "3"),
        ({"enum": ["auto", 1]}, "1", 1),
        ({"const": "true"}, "true", "true"),
        *(({"type": "boolean"}, text, True) for text in ("true", "True", "TRUE")),
        ({"type": "array"}, "['x', True, None]", ["x", True, None]),
        ({"anyOf": [{"type": "array"}, NULL]}, "[true, 'x']", [True, "x"]),
        ({"type": "object"}, "{'a': (1, 2)}", {"a": [1, 2]}),
        (STRING, "['x']", "['x']"),
        (INTEGER, "many", "many"),
        ({"type": ["string", "array"]}, '["x"]', ["x"]),
        ({"type": "number"}, "1e999", "1e999"),
        ({}, "5", 5),
    ],
)  # fmt: skip
@pytest.mark.parametrize("place", [
    lambda schema: {"properties": {"a": schema}, "$defs": DEFINED},
    lambda schema: {"$ref": "#/$defs/own", "$defs": DEFINED | {"own": {"properties": {"a": schema}}}},
    lambda schema: {"allOf": [{"properties": {"a": schema}}, {"properties": {"b": {}}}], "$defs": DEFINED},
    lambda schema: {"additionalProperties": schema, "$defs": DEFINED},
])  # fmt: skip
def test_arguments_of_tags_are_what_any_form_of_schema_says(
    schema: dict[str, Any], text: str, value: Any, place: Any
) -> None:
    written = f"<tool_call><function=f><parameter=a>\n{text}\n</parameter></function></tool_call>"
    ((_, arguments),) = read(plan("qwen3-coder", tools={"f": place(schema)}), [written])[2]
    found = json.loads(arguments)["a"]
    assert (found, type(found)) == (value, type(value))


TURNS = (
    "{%% for m in messages %%}<|im_start|>{{ m.role }}\n{{ m.content }}{%% for c in m.tool_calls or [] %%}%s{%% endfor %%}<|im_end|>\n"
    "{%% endfor %%}{%% if add_generation_prompt %%}<|im_start|>assistant\n{%% endif %%}"
)
NAME, ARGUMENTS, EACH = (
    "{{ c.function.name }}",
    "{{ c.function.arguments | tojson }}",
    "{% for k, v in c.function.arguments.items() %}",
)
WRITES = [
    # family, how the template writes a call, special tokens in it
    ("hermes", f'<tool_call>\n{{"name": "{NAME}", "arguments": {ARGUMENTS}}}\n</tool_call>', ()),
    ("qwen3-coder", f"<tool_call>\n<function={NAME}>\n{EACH}<parameter={{{{ k }}}}>\n{{{{ v }}}}\n</parameter>\n{{% endfor %}}</function>\n</tool_call>", ()),
    ("json", f'{{"name": "{NAME}", "parameters": {ARGUMENTS}}}', ()),
    ("pythonic", f"[{NAME}({EACH}{{{{ k }}}}='{{{{ v }}}}'{{% endfor %}})]", ()),
    ("mistral", f'[TOOL_CALLS] [{{"name": "{NAME}", "arguments": {ARGUMENTS}}}]', ("[TOOL_CALLS]",)),
    ("hermes", f"<tool_call>{ARGUMENTS}</tool_call>", ()),  # does not write the name
    ("unknown", f"<tool_call>{NAME}\n{EACH}<arg_key>{{{{ k }}}}</arg_key>\n<arg_value>{{{{ v }}}}</arg_value>\n{{% endfor %}}</tool_call>", ("<tool_call>", "<arg_key>")),  # GLM
    ("unknown", f"<|tool_calls_section_begin|><|tool_call_begin|>functions.{NAME}:0<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|>", ("<|tool_call_begin|>", "<|tool_call_end|>")),  # Kimi K2
    ("unknown", "", ("<|tool_call_begin|>",)),  # an early template of it
    ("unknown", f"<seed:tool_call>\n<function={NAME}>\n{EACH}<parameter={{{{ k }}}}>{{{{ v }}}}</parameter>{{% endfor %}}</function>", ()),
    ("unknown", f'<|tool_call|>[{{"name": "{NAME}", "arguments": {ARGUMENTS}}}]', ("<|tool_call|>",)),  # Granite
    ("json", "", ()),
]  # fmt: skip


@pytest.mark.parametrize(("family", "call", "special"), WRITES)
def test_a_grammar_is_one_that_reads_what_the_template_writes(
    family: str, call: str, special: tuple[str, ...]
) -> None:
    template = ChatTemplate(TURNS % call, {})
    found = known_format(format_of(template.source), template.history, ["<|im_end|>", *special])
    assert found.family == family
    assert set(special) <= {*found.markers}
    assert "<|im_end|>" not in found.markers
    if family == "unknown":
        text = f"I look.{call}"
        for texts in ([text], list(text)):
            assert read(plan("json", format=found), texts) == ("", text, [])
