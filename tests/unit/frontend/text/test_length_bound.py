"""What cannot fit is refused without being tokenized, and nothing else is."""

import asyncio
import json
import random
import unicodedata

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from penstock.frontend.errors import ContextLengthError
from penstock.frontend.openai.bodies import ChatRequest, CompletionRequest, Message
from penstock.frontend.requests.preprocess import Preprocessor
from penstock.frontend.text.length import _NFC_SHRINKS_MAX, _SPACES, LengthBound
from penstock.frontend.text.models import ServedModel
from tests.support.tokenizer import tiny_card, tiny_model_files, tiny_tokenizer_json


def bound(tokenizer: Tokenizer) -> LengthBound:
    return LengthBound(tokenizer, tokenizer.to_str().encode())


def tiny() -> Tokenizer:
    return Tokenizer.from_buffer(tiny_tokenizer_json())


def pieces(*, byte_fallback: bool = True) -> Tokenizer:
    vocabulary = [f"<0x{byte:02X}>" for byte in range(256)] + ["<unk>", "▁", "a", "aa", "aaaa"]
    table = {piece: index for index, piece in enumerate(vocabulary)}
    merges = [("a", "a"), ("aa", "aa")]
    model = models.BPE(
        vocab=table, merges=merges, byte_fallback=byte_fallback, unk_token="<unk>", fuse_unk=True
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


def test_a_text_has_at_least_its_bytes_through_those_of_the_longest_token() -> None:
    assert bound(tiny()).tokens_min("x" * 13_000) == 1000  # <|assistant|>
    assert bound(pieces()).tokens_min("x" * 6_001) == 1001  # <0x..>
    assert bound(tiny()).tokens_min("") == 0


def test_white_space_does_not_count_since_a_special_token_may_swallow_it() -> None:
    tokenizer = tiny()
    tokenizer.add_tokens([AddedToken("<think>", lstrip=True, rstrip=True)])
    text = "<think>" + " \n\u3000\u00a0" * 5000
    assert len(tokenizer.encode(text).ids) == 1
    assert bound(tokenizer).tokens_min(text) == 1


def test_all_white_space_is_known() -> None:
    assert [chr(code) for code in range(0x110000) if chr(code).isspace()] == list(_SPACES)


def test_unicode_normalization_is_reckoned_with() -> None:
    tokenizer = tiny()
    tokenizer.normalizer = normalizers.NFC()
    text = "\u1100\u1161\u11a8" * 4000  # nine bytes that become three
    assert bound(tiny()).tokens_min(text) == -(-36_000 // 13)
    assert bound(tokenizer).tokens_min(text) == -(-36_000 // (13 * _NFC_SHRINKS_MAX))
    assert bound(tokenizer).tokens_min("x" * 13_000) == 1000  # ASCII stays as it is


def test_no_text_shrinks_more_than_is_reckoned_with() -> None:
    longest: dict[str, int] = {}  # what becomes this one character
    composed, plain = [], []
    for character in map(chr, [*range(0xD800), *range(0xE000, 0x110000)]):
        is_composed = unicodedata.decomposition(character) or "가" <= character <= "힣"
        (composed if is_composed else plain).append(character)
    assert unicodedata.is_normalized("NFC", "\n".join(plain))  # no newline is part of anything
    for character in composed:
        normal = unicodedata.normalize("NFC", character)
        assert character.isspace() or not normal.isspace()
        longest[normal] = max(longest.get(normal, len(normal.encode())), len(character.encode()))
    for character, widest in longest.items():
        parts = [longest.get(part, len(part.encode())) for part in unicodedata.normalize("NFD", character)]
        assert max(sum(parts), widest) <= _NFC_SHRINKS_MAX * len(character.encode())


@pytest.mark.parametrize("what", ["lower", "strips", "removes", "unknown"])
def test_a_tokenizer_that_may_drop_anything_gives_no_bound(what: str) -> None:
    tokenizer = pieces(byte_fallback=False) if what == "unknown" else tiny()
    if what == "lower":
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.NFKC()])
    elif what == "strips":
        tokenizer.normalizer = normalizers.Replace("xx", "x")
    elif what == "removes":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split("x", "removed"), pre_tokenizers.ByteLevel()]
        )
    else:
        assert len(tokenizer.encode("x" * 1000).ids) <= 2
    assert bound(tokenizer).tokens_min("x" * 100_000) == 0


def test_bounds_hold_for_random_texts() -> None:
    rng = random.Random(3)
    alphabet = ["the ", "quick ", "<|assistant|>", "é", "你", " ", "\n", "aaaa", "\u1100\u1161\u11a8", "▁"]
    for tokenizer in (tiny(), pieces()):
        least = bound(tokenizer)
        for _ in range(200):
            text = "".join(rng.choices(alphabet, k=rng.randrange(40)))
            assert least.tokens_min(text) <= len(tokenizer.encode(text).ids)


class _Untouchable:
    def encode_batch_fast(self, *_: object, **__: object) -> None:
        raise AssertionError("tokenized what cannot fit")


def prepare(request: ChatRequest | CompletionRequest, served: ServedModel, size_bytes: int) -> None:
    async def main() -> None:
        preprocessor = Preprocessor(hash_key=bytes(16), rng=random.Random(0))
        await preprocessor.encode(request, served, size_bytes)

    asyncio.run(main())


def test_what_cannot_fit_is_not_tokenized() -> None:
    served = ServedModel(tiny_card(), tiny_model_files())
    served.tokenizer = _Untouchable()  # type: ignore[assignment]
    text = "a" * 7_000_000
    with pytest.raises(
        ContextLengthError, match=r"messages: 70000\d\d bytes are at least 5384\d\d tokens .* 512"
    ) as no:
        prepare(ChatRequest(model="tiny", messages=[Message(role="user", content=text)]), served, len(text))
    assert (no.value.param, no.value.http_status) == ("messages", 400)
    with pytest.raises(ContextLengthError, match=r"prompt: 7000000 bytes are at least 538462 tokens"):
        prepare(CompletionRequest(model="tiny", prompt=text), served, len(text))


def test_the_length_of_added_tokens_counts() -> None:
    tokenizer = tiny()
    tokenizer.add_special_tokens(["<|" + "é" * 50 + "|>"])
    assert json.loads(tokenizer.to_str())["added_tokens"][-1]["content"].startswith("<|é")
    assert bound(tokenizer).tokens_min("x" * 1040) == 10
