"""Incremental detokenizing: what is held back, and tokenizers of every kind."""

import pytest
from tokenizers import Tokenizer, decoders, models

from penstock.frontend.text.detokenize import Detokenizer
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
