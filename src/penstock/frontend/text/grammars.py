"""Grammars: how each family of models writes its tool calls. A grammar is a generator over a source of text."""

import ast
import json
import re
from collections.abc import Callable, Collection, Generator, Mapping
from typing import Any

from penstock.frontend.text import json_value
from penstock.frontend.text.source import GrammarSource, ParsedOutput, Repair, Steps
from penstock.frontend.text.values import python_value, typed_json

DEEPSEEK_CALLS, DEEPSEEK_CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"  # noqa: RUF001 - as the model writes them
DEEPSEEK_CALL, DEEPSEEK_CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"  # noqa: RUF001
DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"  # noqa: RUF001
DEEPSEEK_MARKERS = (DEEPSEEK_CALLS, DEEPSEEK_CALLS_END, DEEPSEEK_CALL, DEEPSEEK_CALL_END, DEEPSEEK_SEPARATOR)
_AROUND_CALLS = (DEEPSEEK_CALLS, DEEPSEEK_CALLS_END, DEEPSEEK_CALL, DEEPSEEK_CALL_END)
_FENCE = "```"


def read_deepseek(source: GrammarSource, out: ParsedOutput, _: Mapping[str, Any]) -> Steps:
    """Read an answer."""
    while found := (yield from source.prose(out, _AROUND_CALLS)):
        if found == DEEPSEEK_CALL:
            yield from _deepseek_call(source, out)


def _deepseek_call(source: GrammarSource, out: ParsedOutput) -> Steps:
    """Read `function SEP NAME ```json ARGUMENTS ``` ` of V3, or `NAME SEP ARGUMENTS` of V3.1."""
    head: list[str] = []
    found = yield from source.until((DEEPSEEK_SEPARATOR, *_AROUND_CALLS), head.append)
    name = "".join(head).strip()
    if found != DEEPSEEK_SEPARATOR and (found or not source.is_cut):  # it names no function
        out.text("".join(head))
        source.text = found + source.text
        return
    if name == "function":
        line: list[str] = []
        found = yield from source.until(("\n",), line.append)
        name = "".join(line).strip()
    if not name or (source.is_cut and not found):
        return
    out.begin_call(name)
    yield from source.skip_space()
    is_fenced = yield from source.begins_with(f"{_FENCE}json")
    if (yield from json_value.arguments(source, out)) and is_fenced:
        yield from source.skip_space()
        yield from source.begins_with(_FENCE)


MISTRAL_CALLS, MISTRAL_ARGS, MISTRAL_CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_MISTRAL_NAME = re.compile(r"[\w.:-]+")
MISTRAL_MARKERS = (MISTRAL_CALLS, MISTRAL_ARGS, MISTRAL_CALL_ID, "[THINK]", "[/THINK]")


def read_mistral(source: GrammarSource, out: ParsedOutput, _: Mapping[str, Any]) -> Steps:
    """Read an answer."""
    while (yield from source.prose(out, (MISTRAL_CALLS,))):
        space = yield from source.skip_space()
        if (yield from source.peek(1)) == "[":
            yield from _mistral_array(source, out)
        elif (yield from source.peek(1)) == "{":
            yield from json_value.call(source, out)
        else:
            yield from _mistral_named(source, out, space)


def _mistral_array(source: GrammarSource, out: ParsedOutput) -> Steps:
    source.take(1)
    while True:
        yield from source.skip_space()
        following = yield from source.peek(1)
        if following == ",":
            source.take(1)
        elif following == "{":
            yield from json_value.call(source, out)
        else:
            if following == "]":
                source.take(1)
            return


def _mistral_named(source: GrammarSource, out: ParsedOutput, space: str) -> Steps:
    head: list[str] = []
    found = yield from source.until((MISTRAL_ARGS, MISTRAL_CALL_ID, MISTRAL_CALLS, "{"), head.append)
    if found == MISTRAL_CALL_ID:
        found = yield from source.until((MISTRAL_ARGS, "{"), lambda _: None)
    name = "".join(head).strip()
    if not name or (source.is_cut and not found):
        return
    if not _MISTRAL_NAME.fullmatch(name):  # it speaks of the mark
        out.text(MISTRAL_CALLS + space + "".join(head))
        source.text = found + source.text
        return
    if found == "{":
        source.text = found + source.text
    out.begin_call(name)
    yield from source.skip_space()
    if found == MISTRAL_CALLS or (
        yield from source.begins_with(MISTRAL_CALLS)
    ):  # without arguments, and another call follows
        out.end_call()
        source.text = MISTRAL_CALLS + source.text
    else:
        yield from json_value.arguments(source, out)


HARMONY_START, HARMONY_CHANNEL, HARMONY_CONSTRAIN, HARMONY_MESSAGE = (
    "<|start|>",
    "<|channel|>",
    "<|constrain|>",
    "<|message|>",
)
HARMONY_END, HARMONY_CALL, HARMONY_RETURN = "<|end|>", "<|call|>", "<|return|>"
HARMONY_MARKERS = (
    HARMONY_START,
    HARMONY_CHANNEL,
    HARMONY_CONSTRAIN,
    HARMONY_MESSAGE,
    HARMONY_END,
    HARMONY_CALL,
    HARMONY_RETURN,
)
_RECIPIENT = re.compile(r"to=(functions\.)?([\w.-]+)")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_AUTHOR = re.compile(r"<\|start\|>\s*([\w.-]+)")
_ASSISTANT = "assistant"


def read_harmony(source: GrammarSource, out: ParsedOutput, schemas: Mapping[str, Any]) -> Steps:
    """Read an answer, whose prompt ends with `<|start|>assistant`."""
    is_first = True
    while True:
        begins = yield from source.peek(1)
        if not begins:
            return
        head: list[str] = []
        if begins not in {"<", " "}:  # text without a channel
            head.append((yield from source.until((HARMONY_START, HARMONY_CHANNEL), out.content)))
        if not (yield from source.until((HARMONY_MESSAGE,), head.append)):
            text = "".join(head)
            is_head = HARMONY_CHANNEL in text or (
                source.is_cut and (HARMONY_START in text or _RECIPIENT.search(text))
            )
            out.content("" if is_head else text)
            return
        if not is_first and out.has_content:
            out.gap()
        is_first = False
        yield from _harmony_message(source, out, "".join(head), schemas)


def _harmony_message(source: GrammarSource, out: ParsedOutput, head: str, declared: Collection[str]) -> Steps:
    """Read a message: a call of a function, reasoning, or text for the user, by its head."""
    author, channel = _AUTHOR.search(head), _CHANNEL_NAME.search(head)
    emit: Callable[[str], None] = out.content
    if (name := _called(head, declared)) is not None:
        out.begin_call(name)
        yield from json_value.arguments(source, out)
        emit = _drop
    elif (channel is not None and channel[1] == "analysis") or (
        author is not None and author[1] != _ASSISTANT
    ):
        emit = out.reasoning
    if (
        yield from source.until((HARMONY_END, HARMONY_CALL, HARMONY_RETURN, HARMONY_START), emit)
    ) == HARMONY_START:
        source.text = HARMONY_START + source.text


def _called(head: str, declared: Collection[str]) -> str | None:
    """Give the function that a message calls.

    Without `functions.` only a declared name is one; other recipients are the assistant itself and the model's own tools.
    """
    recipient = _RECIPIENT.search(head)
    if recipient is None or not (recipient[1] or recipient[2] in declared):
        return None
    return None if recipient[0] == f"to={_ASSISTANT}" else recipient[2]


def _drop(_: str) -> None:
    """Take white space after a call's arguments."""


HERMES_BEGIN, HERMES_END = "<tool_call>", "</tool_call>"
HERMES_FUNCTION = "<function="
_FUNCTION_END = "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_AFTER_PARAMETERS = (_FUNCTION_END, HERMES_END, HERMES_FUNCTION, HERMES_BEGIN)
_AFTER_VALUE = (_PARAMETER_END, _PARAMETER, *_AFTER_PARAMETERS)
_AFTER_NAME = (">", "\n")


def read_hermes(source: GrammarSource, out: ParsedOutput, schemas: Mapping[str, Any]) -> Steps:
    """Read an answer; `schemas` are the JSON schemas of tools' arguments, by name."""
    yield from _read_hermes(source, out, schemas, (HERMES_BEGIN,))


def read_qwen_coder(source: GrammarSource, out: ParsedOutput, schemas: Mapping[str, Any]) -> Steps:
    """Read an answer of Qwen3-Coder, in which a call may lack its first tag."""
    yield from _read_hermes(source, out, schemas, (HERMES_BEGIN, HERMES_FUNCTION))


def _read_hermes(
    source: GrammarSource, out: ParsedOutput, schemas: Mapping[str, Any], begins: tuple[str, ...]
) -> Steps:
    while found := (yield from source.prose(out, begins)):
        space = "" if found == HERMES_FUNCTION else (yield from source.skip_space())
        if found == HERMES_FUNCTION:
            out.repair(Repair.TAG)
        if found == HERMES_FUNCTION or (yield from source.begins_with(HERMES_FUNCTION)):
            yield from _tagged(source, out, schemas)
        elif (yield from source.peek(1)) == "{":
            while (yield from source.peek(1)) == "{" and (yield from json_value.call(source, out)):
                yield from source.skip_space()
        elif not (yield from source.begins_with(HERMES_END)):
            if not any(mark.startswith(source.text) for mark in (HERMES_FUNCTION, HERMES_END)):
                out.text(found + space)  # it speaks of the mark
                continue
            source.text = ""  # the answer ends in a mark
        yield from source.skip_space()
        yield from source.begins_with(HERMES_END)


def _tagged(source: GrammarSource, out: ParsedOutput, schemas: Mapping[str, Any]) -> Steps:
    """Read `NAME>`, then `<parameter=KEY>VALUE</parameter>` as often as it comes, then `</function>`; any of the ends may lack."""
    space = yield from source.skip_space()
    name, found = yield from _text_up_to(source, _AFTER_NAME)
    name = name.strip()
    if source.breaks_off():
        return
    if not name:
        out.text(f"{HERMES_FUNCTION}{space}{found}" if found else "")
        return
    out.begin_call(name)
    yield from source.skip_space()
    if (yield from source.peek(1)) == "{":
        if (yield from json_value.arguments(source, out)):
            yield from source.skip_space()
            yield from source.begins_with(_FUNCTION_END)
        return
    separator = "{"
    found = (yield from _text_up_to(source, (_PARAMETER, *_AFTER_PARAMETERS)))[1]
    while found == _PARAMETER:
        key = (yield from _text_up_to(source, _AFTER_NAME))[0].strip()
        text, found = yield from _text_up_to(source, _AFTER_VALUE)
        if source.is_cut and not found:
            return
        value = typed_json(text.removeprefix("\n").removesuffix("\n"), key, schemas.get(name))
        out.arguments(f"{separator}{json.dumps(key)}: {value}")
        separator = ", "
        if found == _PARAMETER_END:
            found = (yield from _text_up_to(source, (_PARAMETER, *_AFTER_PARAMETERS)))[1]
        else:
            out.repair(Repair.TAG)
    if source.is_cut and not found:
        return
    out.arguments("{}" if separator == "{" else "}")
    out.end_call()
    if found != _FUNCTION_END:
        source.text = found + source.text


def _text_up_to(source: GrammarSource, ends: tuple[str, ...]) -> Generator[None, None, tuple[str, str]]:
    """Read up to one of some marks, and read that; gives both."""
    pieces: list[str] = []
    found = yield from source.until(ends, pieces.append)
    return "".join(pieces), found


PYTHON_TAG = "<|python_tag|>"
PYTHON_START, PYTHON_END = "<|python_start|>", "<|python_end|>"
PYTHON_MARKERS = (PYTHON_START, PYTHON_END)
_CALL = re.compile(r"\s{0,256}([A-Za-z_][\w.-]{0,255})\s{0,256}\(")
_BEGUN_CALL = re.compile(r"\s{0,256}([A-Za-z_][\w.-]{0,255}\s{0,256})?")
"""What may become one: bounded, as it is matched again with each piece of text."""
_CALL_CHARACTERS_MAX = 64 << 10


def read_json(source: GrammarSource, out: ParsedOutput, schemas: Mapping[str, Any]) -> Steps:
    """Read an answer: `{"name": ..., "parameters": {...}}`, several with `;` between them, or text.

    Without a mark before it an object is a call only with a name of `schemas`, as it may be the answer that was asked for.
    """
    found = yield from source.lead(out, (PYTHON_TAG,))
    while True:
        names = None if found else schemas
        announced = bool(found)
        yield from source.skip_space() if found else ()
        while (yield from source.peek(1)) == "{":
            if not (yield from json_value.call(source, out, names=names, announced=announced)):
                break
            announced = True
            yield from source.skip_space()
            if (yield from source.peek(1)) in {";", ","}:
                source.take(1)
                yield from source.skip_space()
        found = yield from source.prose(out, (PYTHON_TAG,))
        if not found:
            return


def read_pythonic(source: GrammarSource, out: ParsedOutput, schemas: Mapping[str, Any]) -> Steps:
    """Read an answer: `[f(a=1), g(b='x')]`, or text; without a mark before it only names of `schemas` are called."""
    found = yield from source.lead(out, (PYTHON_START,))
    while True:
        yield from source.skip_space() if found else ()
        if (yield from source.peek(1)) == "[":
            yield from _pythonic_list(source, out, schemas, is_marked=bool(found))
        found = yield from source.prose(out, (PYTHON_START,))
        if not found:
            return


def _pythonic_list(
    source: GrammarSource, out: ParsedOutput, schemas: Mapping[str, Any], *, is_marked: bool
) -> Steps:
    raw = source.take(1)
    while (yield from _begins_call(source)):
        text = yield from _call_text(source)
        parsed = _parsed(text)
        if parsed is None or not (is_marked or parsed[0] in schemas):
            if source.breaks_off() and _pythonic_name(text) in schemas:
                return
            source.text = text + source.text
            break
        raw = ""
        out.call(*parsed)
        yield from source.skip_space()
        if (yield from source.peek(1)) != ",":
            break
        source.take(1)
    out.text(raw)
    if not raw:
        yield from source.skip_space()
        yield from source.begins_with("]")
        yield from source.skip_space()
        yield from source.begins_with(PYTHON_END)


def _pythonic_name(text: str) -> str:
    found = _CALL.match(text)
    return "" if found is None else found[1]


def _begins_call(source: GrammarSource) -> Generator[None, None, bool]:
    while not _CALL.match(source.text):
        if source.ended or _BEGUN_CALL.fullmatch(source.text) is None:
            return False
        yield
    return True


def _call_text(source: GrammarSource) -> Generator[None, None, str]:
    """Read up to the parenthesis that closes a call, or the end."""
    text, depth, quote, escaped = "", 0, "", False
    while True:
        for at, character in enumerate(source.text):
            if quote:
                if escaped:
                    escaped = False
                elif character == "\\":
                    escaped = True
                elif character == quote:
                    quote = ""
            elif character in "'\"":
                quote = character
            elif character in "([{":
                depth += 1
            elif character in ")]}":
                depth -= 1
                if not depth:
                    return text + source.take(at + 1)
        text += source.take(len(source.text))
        if source.ended or len(text) > _CALL_CHARACTERS_MAX:
            return text
        yield


def _parsed(text: str) -> tuple[str, str] | None:
    """Give a call's name, and its arguments as JSON; None if it is no call of literals."""
    try:
        node = ast.parse(text.strip(), mode="eval").body
        if not isinstance(node, ast.Call) or node.args:
            return None
        arguments = {keyword.arg: python_value(keyword.value) for keyword in node.keywords}
        return ast.unparse(node.func), json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def read_required(source: GrammarSource, out: ParsedOutput, _: Mapping[str, Any]) -> Steps:
    """Read `[{"name": ..., "parameters": {...}}, ...]`."""
    yield from source.skip_space()
    if not (yield from source.begins_with("[")):
        yield from source.rest(out.content)
        return
    while True:
        yield from source.skip_space()
        following = yield from source.peek(1)
        if following == ",":
            source.take(1)
        elif following != "{" or not (yield from json_value.call(source, out)):
            break
    yield from source.rest(lambda _: None)


def read_named(source: GrammarSource, out: ParsedOutput, name: str) -> Steps:
    """Read the arguments of the tool `name`."""
    out.begin_call(name)
    yield from json_value.arguments(source, out)
    yield from source.rest(lambda _: None)
