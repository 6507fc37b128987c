"""Text of servers that give no token ids becomes ids whose text is the same."""

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from penstock.core.errors import ConfigError
from penstock.engine.openai.text import TextCodec
from penstock.frontend.text.tokens import Detokenizer
from tests.support.tokenizer import END, tiny_tokenizer_json


def byte_level() -> Tokenizer:
    return Tokenizer.from_buffer(tiny_tokenizer_json())


def nfc() -> Tokenizer:
    """As Qwen's: text is normalized before it is encoded, so not every text has ids by encoding it."""
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def pieces(decoder: decoders.Decoder) -> Tokenizer:
    words = ["▁", "▁hello", "hello", "▁wor", "ld", "a", "b", "c", "\n", "é", "▁a", "."]
    vocabulary = {"<unk>": 0, "<s>": 1} | {f"<0x{byte:02X}>": 2 + byte for byte in range(256)}
    vocabulary |= {word: 258 + number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<s>", "<unk>"])
    return tokenizer


def llama2() -> Tokenizer:
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return pieces(decoders.Sequence(steps))


def gemma() -> Tokenizer:
    return pieces(decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]))


MAKERS = {"byte_level": byte_level, "nfc": nfc, "llama2": llama2, "gemma": gemma}


@functools.cache
def made(name: str) -> tuple[TextCodec, Detokenizer]:
    tokenizer = MAKERS[name]()
    return TextCodec(tokenizer), Detokenizer(tokenizer, tokenizer.to_str().encode())


TEXTS = st.lists(
    st.one_of(
        st.text(max_size=12),
        st.sampled_from(
            ["hello", " hello", " ", "  ", "\n", END, "<s>", "é", "e\u0301", "你好", "🎉", "a b", "<0xE2>"]
        ),
    ),
    max_size=12,
)


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKERS)
@given(TEXTS)
@settings(max_examples=3 * settings.default.max_examples // 2, deadline=None)
def test_pieces_of_text_detokenize_to_the_same_text(name, texts):
    codec, detokenizer = made(name)
    decoder = detokenizer.stream(begins_text=False)
    shown = "".join(decoder.feed(codec.spell(text)) for text in texts) + decoder.finish()
    assert shown == "".join(texts)


def test_the_text_of_a_special_token_is_no_special_token():
    codec, _ = made("byte_level")
    assert 0 not in codec.spell(END)


def test_a_prompt_goes_without_the_tokens_that_a_server_adds():
    tokenizer = byte_level()
    first = tokenizer.token_to_id("<|system|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|system|> $A", special_tokens=[("<|system|>", first)]
    )
    codec = TextCodec(tokenizer)
    token_ids = tokenizer.encode("the dog").ids
    assert token_ids[0] == first
    assert codec.prompt_text(token_ids) == "the dog"
    assert codec.prompt_text(token_ids[1:]) == "the dog"
    assert codec.prompt_text([first, *token_ids]) == "<|system|>the dog"


def test_a_tokenizer_whose_tokens_have_no_text_of_their_own_is_refused():
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "aa": 1, "[UNK]": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(ConfigError, match="joins tokens by more than their text"):
        TextCodec(tokenizer)
