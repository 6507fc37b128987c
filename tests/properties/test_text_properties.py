"""Text that comes in pieces equals text made at once: detokenizing, stop strings, and both in one choice."""

import functools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from penstock.core.ids import RequestId
from penstock.core.types.requests import Delta, FinishReason, TokenLogprob
from penstock.core.wire import pack_tokens
from penstock.frontend.completion import ChoiceText
from penstock.frontend.text.tokens import Detokenizer, StopFinder
from tests.support.tokenizer import tiny_tokenizer_json


def _byte_level() -> Tokenizer:
    tokenizer = Tokenizer.from_buffer(tiny_tokenizer_json())
    tokenizer.add_tokens([AddedToken("<think>"), AddedToken("日 x"), AddedToken(" é ")])
    return tokenizer


def _pieces(decoder: decoders.Decoder) -> Tokenizer:
    pieces = ["▁", "▁▁", "▁hello", "lo", "wor▁ld", "é", "你好", "<0x>", "<0xZZ>", " ", "  x", "<s>"]
    vocabulary = [f"<0x{byte:02X}>" for byte in range(256)] + pieces
    table = {piece: index for index, piece in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.BPE(vocab=table, merges=[], byte_fallback=True))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


REPLACE, FALLBACK, FUSE = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()
TOKENIZERS = {
    "byte_level": _byte_level,
    "llama2": lambda: _pieces(decoders.Sequence([REPLACE, FALLBACK, FUSE, decoders.Strip(" ", 1, 0)])),
    "gemma": lambda: _pieces(decoders.Sequence([REPLACE, FALLBACK, FUSE])),
    "strip_three": lambda: _pieces(decoders.Sequence([REPLACE, FALLBACK, FUSE, decoders.Strip(" ", 3, 0)])),
    "metaspace": lambda: _pieces(decoders.Metaspace()),
    "metaspace_never": lambda: _pieces(decoders.Metaspace(prepend_scheme="never")),
    "metaspace_bytes": lambda: _pieces(decoders.Sequence([decoders.Metaspace(), FALLBACK, FUSE])),
}


@functools.cache
def _load(name: str) -> tuple[Tokenizer, Detokenizer]:
    tokenizer = TOKENIZERS[name]()
    content = tokenizer.to_str().encode()
    assert json.loads(content)["decoder"]
    return tokenizer, Detokenizer(tokenizer, content)


def split(data: st.DataObject, items: list) -> list[list]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(items)), max_size=6)))
    return [items[start:end] for start, end in zip([0, *cuts], [*cuts, len(items)], strict=True)]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_decoding_in_pieces_gives_the_same_text(name: str, data: st.DataObject) -> None:
    tokenizer, detokenizer = _load(name)
    size = tokenizer.get_vocab_size()
    ids = st.one_of(st.integers(0, size + 1), st.integers(size - 14, size - 1), st.integers(0x80, 0xF4))
    token_ids = data.draw(st.lists(ids, max_size=24))
    stream = detokenizer.stream()
    text = "".join(stream.feed(part) for part in split(data, token_ids)) + stream.finish()
    assert text == tokenizer.decode(token_ids)


@given(st.text(max_size=60).filter(lambda text: "<|" not in text), st.data())  # special tokens are left out
def test_encoded_text_comes_back(text: str, data: st.DataObject) -> None:
    tokenizer, detokenizer = _load("byte_level")
    stream = detokenizer.stream()
    parts = split(data, tokenizer.encode(text, add_special_tokens=False).ids)
    assert "".join(stream.feed(part) for part in parts) + stream.finish() == text


def naive_stop(text: str, stops: list[str]) -> tuple[str, bool]:
    for end in range(len(text) + 1):
        found = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(found)], True
    return text, False


STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3)


@given(st.text("abc", max_size=30), STOPS, st.data())
def test_stop_strings_are_found_wherever_the_text_is_cut(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    finder, given_out, stopped = StopFinder(stops), "", False
    for part in split(data, list(text)):
        certain, stopped = finder.feed("".join(part))
        given_out += certain
        expected = naive_stop(text, stops)[0]
        assert expected.startswith(given_out)  # what is out is never taken back
        if stopped:
            break
    if not stopped:
        given_out += finder.finish()
    assert (given_out, stopped) == naive_stop(text, stops)


@given(st.data())
def test_a_choice_gives_the_same_however_its_tokens_arrive(data: st.DataObject) -> None:
    """Text, finish reason, usage and log-probabilities do not depend on how deltas were merged."""
    tokenizer, detokenizer = _load("byte_level")
    token_ids = data.draw(st.lists(st.integers(5, tokenizer.get_vocab_size() - 1), min_size=1, max_size=20))
    whole = tokenizer.decode(token_ids)
    stops = data.draw(
        st.lists(st.one_of(st.text("the ", min_size=1), st.sampled_from([whole[i : i + 3] for i in range(len(whole))] or ["x"])), max_size=2)
    )  # fmt: skip
    logprobs = data.draw(st.booleans())
    results = []
    for parts in ([token_ids], split(data, token_ids), [[token_id] for token_id in token_ids]):
        choice = ChoiceText(0, detokenizer, tuple(stops), begins_text=True)
        events = []
        for index, part in enumerate(parts):
            entries = tuple(TokenLogprob(token_id=i, logprob=-1.0) for i in part) if logprobs else ()
            reason = FinishReason.LENGTH if index == len(parts) - 1 else None
            event = choice.feed(Delta(request_id=RequestId("r"), token_ids=pack_tokens(part), logprobs=entries, finish_reason=reason))  # fmt: skip
            if event is not None:
                events.append(event)
            if choice.finished:
                break
        text = "".join(event.text for event in events)
        tokens = [token for event in events for token in event.logprobs]
        results.append((text, events[-1].finish_reason, choice.output_tokens, tokens))
        assert text == (naive_stop(whole, stops)[0] if stops else whole)
        assert [token.logprob.token_id for token in tokens] == (token_ids[: len(tokens)] if logprobs else [])
    assert results[0] == results[1] == results[2]
