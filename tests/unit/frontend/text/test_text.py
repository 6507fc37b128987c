"""Text of answers: detokenized, in blocks, up to a stop string; and the text that templates make."""

import json
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from penstock.core.errors import ConfigError, RequestError
from penstock.frontend.text.answer import BlockKind, Blocks, TextEvent
from penstock.frontend.text.source import CallDelta
from penstock.frontend.text.template import ChatTemplate, ChatTemplates
from penstock.frontend.text.tokens import Detokenizer, StopFinder
from tests.support.tokenizer import tiny_tokenizer_json


def byte_level() -> tuple[Tokenizer, Detokenizer]:
    tokenizer = Tokenizer.from_buffer(tiny_tokenizer_json())
    return tokenizer, Detokenizer(tokenizer, tiny_tokenizer_json())


def pieces(decoder: decoders.Decoder) -> tuple[Tokenizer, Detokenizer]:
    """A SentencePiece-like vocabulary: ids 0 to 255 are bytes."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for piece in ("▁hello", "▁", "lo", "é", "<s>"):
        vocabulary[piece] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer, Detokenizer(tokenizer, tokenizer.to_str().encode())


LLAMA = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)
HELLO, SPACE, LO, E_ACUTE, BOS = 256, 257, 258, 259, 260


def test_an_unfinished_character_ends_as_a_replacement() -> None:
    tokenizer, detokenizer = byte_level()
    stream = detokenizer.stream()
    assert stream.feed([tokenizer.token_to_id("ð")]) == ""
    assert stream.finish() == "\ufffd"


def test_special_and_unknown_tokens_are_no_text() -> None:
    tokenizer, detokenizer = byte_level()
    stream = detokenizer.stream()
    assert stream.feed([0, tokenizer.token_to_id("a"), 1, 99_999]) == "a"
    assert detokenizer.token_bytes(0) == b"<|end|>"
    assert detokenizer.token_bytes(99_999) == b""


def test_a_run_of_bytes_is_held_until_it_ends() -> None:
    _, detokenizer = pieces(LLAMA)
    stream = detokenizer.stream()
    assert [stream.feed([byte]) for byte in "你".encode()] == ["", "", ""]
    assert stream.feed([LO]) == "你lo"
    assert stream.feed([0xFF, 0x41]) == ""
    assert stream.finish() == "\ufffd\ufffd"  # one bad byte spoils the run
    assert detokenizer.token_bytes(0xFF) == b"\xff"
    assert detokenizer.token_bytes(HELLO) == b" hello"


def test_only_a_text_of_its_own_loses_its_first_space() -> None:
    for decoder in (LLAMA, decoders.Metaspace()):
        _, detokenizer = pieces(decoder)
        assert detokenizer.stream(begins_text=True).feed([BOS, HELLO, HELLO]) == "hello hello"
        assert detokenizer.stream(begins_text=False).feed([BOS, HELLO, HELLO]) == " hello hello"


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece()])
def test_other_decoders_are_run_in_a_window(decoder: decoders.Decoder | None) -> None:
    tokenizer = Tokenizer(models.WordLevel({"one": 0, "##ly": 1, "two": 2, "three": 3}, unk_token="one"))
    if decoder is not None:
        tokenizer.decoder = decoder
    detokenizer = Detokenizer(tokenizer, tokenizer.to_str().encode())
    token_ids = [0, 1, 2, 3, 2, 1]
    stream = detokenizer.stream()
    text = "".join(stream.feed([token_id]) for token_id in token_ids) + stream.finish()
    assert text == tokenizer.decode(token_ids)
    assert detokenizer.token_bytes(2) == b"two"


class CountingTokenizer:
    """Counts the ids that it decodes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.id_to_token = tokenizer.id_to_token
        self.decoded = 0

    def decode(self, token_ids: list[int], **options: bool) -> str:
        self.decoded += len(token_ids)
        return self._tokenizer.decode(token_ids, **options)


@pytest.mark.parametrize("silent", [4, 99], ids=["special", "unknown"])
def test_a_window_stays_short_in_a_run_of_tokens_without_text(silent: int) -> None:
    tokenizer = Tokenizer(models.WordLevel({"one": 0, "##ly": 1, "two": 2, "three": 3}, unk_token="one"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["<|pad|>"])
    counting: Any = CountingTokenizer(tokenizer)
    stream = Detokenizer(counting, tokenizer.to_str().encode()).stream()
    text = "".join(stream.feed([token_id]) for token_id in [0, *[silent] * 1000, 2])
    assert text + stream.finish() == "one two"
    assert counting.decoded < 1000 * 500, "a thousand tokens of a window that grows are a million and more"


def steps(blocks: Blocks, event: TextEvent) -> list[tuple[str, int, str]]:
    return [(step.value, block.index, text) for step, block, text in blocks.feed(event)]


def test_each_kind_of_text_has_a_block_that_closes_before_the_next_opens() -> None:
    blocks = Blocks()
    assert steps(blocks, TextEvent(0, "", reasoning="hm")) == [("opened", 0, ""), ("added", 0, "hm")]
    both = TextEvent(0, "so", reasoning="m")
    assert steps(blocks, both) == [
        ("added", 0, "m"),
        ("closed", 0, ""),
        ("opened", 1, ""),
        ("added", 1, "so"),
    ]
    calls = [CallDelta(0, "f", "{"), CallDelta(0, None, "}"), CallDelta(1, "g")]
    assert steps(blocks, TextEvent(0, "", calls=calls)) == [
        ("closed", 1, ""), ("opened", 2, ""), ("added", 2, "{"), ("added", 2, "}"), ("closed", 2, ""), ("opened", 3, ""),
    ]  # fmt: skip
    end = TextEvent(0, "", "stop", stopped_by="x", calls=[CallDelta(1, None, "{}")])
    assert steps(blocks, end) == [("added", 3, "{}"), ("closed", 3, "")]
    assert [(block.kind, block.text, block.name) for block in blocks.all] == [
        (BlockKind.REASONING, "hmm", ""), (BlockKind.TEXT, "so", ""), (BlockKind.CALL, "{}", "f"), (BlockKind.CALL, "{}", "g"),
    ]  # fmt: skip
    assert (blocks.finish_reason, blocks.stopped_by) == ("stop", "x")


def test_an_answer_without_text_has_no_blocks() -> None:
    blocks = Blocks()
    assert steps(blocks, TextEvent(0, "", "length")) == []
    assert blocks.all == []


class Piece(str):
    """Counts the characters to which it is appended."""

    __slots__ = ()
    copied = 0

    def __radd__(self, before: str) -> str:
        Piece.copied += len(before)
        return f"{before}{self}"


def test_a_text_is_not_copied_for_each_of_its_pieces() -> None:
    blocks = Blocks()
    for _ in range(1000):
        steps(blocks, TextEvent(0, Piece("écrit ")))
    (block,) = blocks.all
    assert (block.text, Piece.copied) == ("écrit " * 1000, 0)


def feed(stops: list[str], *texts: str) -> tuple[list[str], bool]:
    finder = StopFinder(stops)
    given = []
    for text in texts:
        certain, stopped = finder.feed(text)
        given.append(certain)
        if stopped:
            return given, True
    given.append(finder.finish())
    return given, False


@pytest.mark.parametrize(
    ("stops", "texts", "given", "stopped"),
    [
        (["END"], ["hello ", "world"], ["hello ", "world", ""], False),
        (["END"], ["one E", "N", "D two"], ["one ", "", ""], True),
        (["END"], ["one E", "N", "E"], ["one ", "", "EN", "E"], False),
        (["END"], ["xEN"], ["x", "EN"], False),
        (["abcd", "bc"], ["xabc", "d"], ["xa"], True),
        (["cde", "abcde"], ["xabcde"], ["x"], True),
        (["aab"], ["aaa", "b"], ["a", ""], True),
    ],
    ids=[
        "none",
        "across borders",
        "a beginning that comes to nothing",
        "the end releases what is held",
        "complete first wins",
        "longest of two",
        "overlapping beginnings",
    ],
)
def test_text_is_given_out_as_soon_as_no_stop_string_can_begin_in_it(
    stops: list[str], texts: list[str], given: list[str], stopped: bool
) -> None:
    assert feed(stops, *texts) == (given, stopped)


USER = [{"role": "user", "content": "hi <b>"}]


def render(source: str, messages=USER, arguments=None, **special: str) -> str:
    return ChatTemplate(source, special).render(messages, arguments)


@pytest.mark.parametrize(
    ("source", "arguments", "said"),
    [
        ("{% for m in messages %}\n  {% if true %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}\nend", None, "hi <b>\nend"),
        ("{{ bos_token }}{{ enable_thinking }}{{ add_generation_prompt }}{{ tools }}", {"enable_thinking": False}, "<s>FalseTrueNone"),
        ("{{ messages[0].content }}", {"messages": []}, "hi <b>"),
        ("{{ messages | tojson }}{{ \"é'\" | tojson }}", None, '[{"role": "user", "content": "hi <b>"}]"é\'"'),
        ("{% for m in messages * 2 %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}", None, "hi <b>"),
    ],
    ids=["white space", "variables", "arguments do not replace messages", "tojson", "loop controls and generation marks"],
)  # fmt: skip
def test_what_templates_of_the_hub_rely_on(
    source: str, arguments: dict[str, object] | None, said: str
) -> None:
    assert render(source, arguments=arguments, bos_token="<s>") == said


def test_strftime_now_formats_the_date() -> None:
    assert len(render("{{ strftime_now('%Y-%m-%d') }}")) == len("2026-01-01")


def test_a_template_may_refuse_messages() -> None:
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert caught.value.param == "messages"


@pytest.mark.parametrize("source", ["{{ messages[7].content.x }}", "{{ 1 / 0 }}", "{{ messages + 1 }}"])
def test_any_failure_of_a_template_is_a_refusal(source: str) -> None:
    with pytest.raises(RequestError, match="chat template refuses"):
        render(source)


@pytest.mark.parametrize("source", ["{{ ''.__class__.__mro__ }}", "{% set x = messages.append(1) %}"])
def test_templates_cannot_leave_the_sandbox(source: str) -> None:
    with pytest.raises(RequestError):
        render(source)


def test_a_malformed_template_says_where() -> None:
    with pytest.raises(ConfigError, match="chat template: line 2"):
        ChatTemplate("x\n{% if %}", {})


NAMED = [{"name": "tool_use", "template": "tool"}, {"name": "default", "template": "chat"}]
JINJA, PROCESSOR = "chat_template.jinja", "chat_template.json"
TOOL_USE = "additional_chat_templates/tool_use.jinja"


@pytest.mark.parametrize(
    ("config", "files", "said", "with_tools"),
    [
        ({"chat_template": "config", "eos_token": {"content": "</s>"}}, {JINJA: b"file {{ eos_token }}"}, "file </s>", "file </s>"),
        ({"chat_template": "config"}, {}, "config", "config"),
        ({"chat_template": NAMED}, {}, "chat", "tool"),
        ({"chat_template": NAMED}, {JINJA: b"file"}, "file", "file"),
        ({"chat_template": "config"}, {TOOL_USE: b"tools"}, "config", "tools"),
        ({}, {JINJA: b"file", TOOL_USE: b"tools"}, "file", "tools"),
        ({"chat_template": "config"}, {PROCESSOR: b'{"chat_template": "json"}'}, "json", "json"),
        ({}, {PROCESSOR: b'{"chat_template": "json"}', JINJA: b"file"}, "file", "file"),
        ({"chat_template": NAMED[:1]}, {}, "tool", "tool"),
        ({}, {PROCESSOR: b"{}"}, None, None),
    ],
)  # fmt: skip
def test_a_template_is_chosen_as_transformers_does(
    config: dict[str, object], files: dict[str, bytes], said: str | None, with_tools: str | None
) -> None:
    loaded = ChatTemplates.load({"tokenizer_config.json": json.dumps(config).encode(), **files})
    rendered = [None if loaded is None else loaded.of(tools=tools).render(USER) for tools in (False, True)]
    assert rendered == [said, with_tools]


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.json"])
def test_a_malformed_configuration_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        ChatTemplates.load({name: b"{"})
