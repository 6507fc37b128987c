"""Prompts: models loaded on first use, tokens word by word, and what cannot fit refused without being tokenized."""

import asyncio
import random
import unicodedata

import msgspec
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from penstock.core.errors import ConfigError, Unavailable
from penstock.core.types.instances import CardFile, ModelCard
from penstock.frontend.apis.bodies import ChatRequest, CompletionRequest, Message
from penstock.frontend.errors import ContextLengthError, UnknownModelError
from penstock.frontend.prepare import Preprocessor
from penstock.frontend.text.models import ModelCache, ServedModel
from penstock.frontend.text.tokens import _NFC_SHRINKS_MAX, LengthBound, WordTokens
from tests.support.dispatcher import ScriptedDispatcher, speak
from tests.support.tokenizer import tiny_card, tiny_model_files, tiny_tokenizer_json


def dispatcher(*names: str, **options) -> ScriptedDispatcher:
    return ScriptedDispatcher(speak([]), cards=[tiny_card(name) for name in names], **options)


async def test_a_model_is_loaded_once_for_all_who_ask_at_once() -> None:
    source = dispatcher("a")
    cache = ModelCache(source, models_max=2)
    models = await asyncio.gather(*(cache.get("a") for _ in range(5)))
    assert len({id(model) for model in models}) == 1
    assert source.fetches == 2


async def test_a_card_of_another_host_with_the_same_files_loads_nothing() -> None:
    source = dispatcher("a")
    cache = ModelCache(source, models_max=2)
    model = await cache.get("a")
    source.cards["a"] = msgspec.structs.replace(source.cards["a"], created_s=2)
    assert await cache.get("a") is model
    source.cards["a"] = msgspec.structs.replace(source.cards["a"], salt=b"another revision")
    assert await cache.get("a") is not model
    assert source.fetches == 4


async def test_an_unknown_model_names_those_that_are() -> None:
    with pytest.raises(UnknownModelError, match=r"model: 'c' does not exist here; models: a, b") as caught:
        await ModelCache(dispatcher("b", "a"), models_max=2).get("c")
    assert (caught.value.http_status, caught.value.param) == (404, "model")
    with pytest.raises(Unavailable, match="no worker is ready") as unavailable:
        await ModelCache(dispatcher(), models_max=2).get("c")
    assert unavailable.value.retry_after_s


async def test_a_model_whose_workers_were_never_reached_is_not_unknown() -> None:
    source = dispatcher("a")
    source.away = {"sql"}
    with pytest.raises(
        Unavailable, match=r"model: 'sql' has workers, but none can take requests now"
    ) as unavailable:
        await ModelCache(source, models_max=2).get("sql")
    assert unavailable.value.retry_after_s


async def test_a_model_whose_workers_are_away_is_remembered() -> None:
    source = dispatcher("a", "b")
    cache = ModelCache(source, models_max=2)
    model = await cache.get("a")
    source.cards.pop("a")
    assert await cache.get("a") is model
    with pytest.raises(UnknownModelError):
        cache.card("a")


async def test_the_one_unused_for_longest_makes_room() -> None:
    source = dispatcher("a", "b", "c")
    cache = ModelCache(source, models_max=2)
    for name in ("a", "b", "a", "c", "a"):
        await cache.get(name)
    assert source.fetches == 6
    await cache.get("b")
    assert source.fetches == 8


async def test_a_fetch_that_fails_is_tried_again_by_the_next() -> None:
    class Flaky(ScriptedDispatcher):
        async def fetch_file(self, card: ModelCard, file: CardFile) -> bytes:
            if self.fetches == 0:
                self.fetches += 1
                raise Unavailable("no worker answered")
            return await super().fetch_file(card, file)

    cache = ModelCache(Flaky(speak([])), models_max=2)
    with pytest.raises(Unavailable):
        await cache.get("tiny")
    assert (await cache.get("tiny")).card.name == "tiny"


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, "has no tokenizer.json"),
        ({"tokenizer.json": b"{"}, r"model a: tokenizer.json: "),
        ({**tiny_model_files(), "tokenizer_config.json": b"["}, "tokenizer_config.json"),
        ({**tiny_model_files(), "chat_template.jinja": b"{% if %}"}, "chat template: line 1"),
    ],
)
async def test_malformed_files_are_named(files: dict[str, bytes], says: str) -> None:
    source = ScriptedDispatcher(speak([]), cards=[tiny_card("a", files)], files=files)
    with pytest.raises(ConfigError, match=says):
        await ModelCache(source, models_max=2).get("a")


async def test_adapters_share_all_that_was_loaded_of_their_model() -> None:
    source = dispatcher("a")
    for name in ("x", "y", "z"):
        source.cards[name] = source.cards["a"].adapted(name)
    cache = ModelCache(source, models_max=2)
    base, x, y = await cache.get("a"), await cache.get("x"), await cache.get("y")
    assert source.fetches == 2
    assert x.tokenizer is y.tokenizer is base.tokenizer
    assert [(m.card.name, m.card.parent) for m in (base, x, y)] == [("a", None), ("x", "a"), ("y", "a")]
    del source.cards["x"]
    assert (await cache.get("x")).card == x.card, "its workers may be back soon"
    await cache.get("z")
    await cache.get("x")
    del source.cards["y"]
    with pytest.raises(UnknownModelError, match=r"model: 'y' does not exist here; models: a, z"):
        await cache.get("y")


QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = QWEN.replace(r"\p{N}| ?", r"\p{N}{1,3}| ?")
GPT_OSS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CORPUS = [
    "The server's answer isn't 12345 tokens; it'll stream them: {'a': [1, 2.5]}\n\n  return x\r\n\t",
    "Don't say WE'VE seen camelCase, snake_case or http://example.com/a?b=c ... 10000 \n\n",
]


def trained(source: str | None) -> Tokenizer:
    """A byte-level BPE that cuts words by `source`; None: by what GPT-2 cuts by."""
    tokenizer = Tokenizer(models.BPE())
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=source is None)
    split = [] if source is None else [pre_tokenizers.Split(Regex(source), "isolated")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, bytes_only])
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|im_start|>", "<|im_end|>", "<|im|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 20, trainer)
    return tokenizer


def words_of(tokenizer: Tokenizer) -> WordTokens:
    return WordTokens(tokenizer, tokenizer.to_str().encode())


def agree(tokens: WordTokens, tokenizer: Tokenizer, text: str) -> None:
    for special in (False, True):
        expected = tokenizer.encode(text, add_special_tokens=special).ids
        assert tokens.encode(text, special=special).tolist() == expected, repr(text)


@pytest.mark.parametrize("source", [None, QWEN, LLAMA3, GPT_OSS], ids=["gpt2", "qwen", "llama3", "gpt-oss"])
def test_words_have_the_tokens_of_the_whole_text(source: str | None) -> None:
    tokenizer = trained(source)
    tokenizer.add_tokens([AddedToken(content, normalized=False) for content in ("<tool>", "a b")])
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.post_processor = processors.TemplateProcessing(
        "<|im_start|> $A", special_tokens=[("<|im_start|>", 0)]
    )
    tokens = words_of(tokenizer)
    assert tokens.cuts_words
    rng = random.Random(0)
    pieces = [
        "<|im_start|>",
        "<|im|>",
        "<|im_end|>",
        "<tool>",
        "a b",
        "'ll",
        "'S",
        " the",
        "  ",
        "\r\n",
        "\n",
        "é",
        "你",
    ]
    for _ in range(1000):
        text = "".join(
            rng.choice(pieces) if rng.random() < 0.3 else chr(rng.randrange(128))
            for _ in range(rng.randrange(24))
        )
        agree(tokens, tokenizer, text)


def test_a_tokenizer_that_changes_or_joins_words_gets_the_whole_text() -> None:
    lower = trained(None)
    lower.normalizer = normalizers.Lowercase()
    spaced = trained(None)
    spaced.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    strips = trained(None)
    strips.add_special_tokens([AddedToken("<strip>", lstrip=True)])
    marks = trained(r"\p{P}|\p{L}+|\s+|.")
    mixed = trained(None)
    mixed.add_tokens([AddedToken("<tool>", normalized=True)])
    random_merges = trained(None)
    random_merges.model.dropout = 0.5
    pieces = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁the", -1.0), ("a", -2.0)], 0))
    pieces.pre_tokenizer = pre_tokenizers.Metaspace()
    for tokenizer in (lower, spaced, strips, mixed, marks, random_merges, pieces):
        tokens = words_of(tokenizer)
        assert not tokens.cuts_words
        if tokenizer is not random_merges:
            agree(tokens, tokenizer, "The quick <strip> brown fox, and the <|im_end|>")


def test_probes_find_a_tokenizer_that_cuts_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.frontend.text.tokens._GPT2", r"\p{L}+|.|\n")
    tokens = words_of(trained(None))
    assert not tokens.cuts_words
    agree(tokens, trained(None), CORPUS[0])


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
