"""Tokens word by word: the same as of the whole text, for tokenizers that cut text into words."""

import random
import threading

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from penstock.frontend.text import words
from penstock.frontend.text.words import WordTokens

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
    monkeypatch.setattr(words, "_GPT2", r"\p{L}+|.|\n")
    tokens = words_of(trained(None))
    assert not tokens.cuts_words
    agree(tokens, trained(None), CORPUS[0])


def test_new_words_are_cached_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "_WORDS_MAX", 400)
    tokenizer = trained(None)
    tokens = words_of(tokenizer)
    for start in range(0, 4000, 40):
        agree(tokens, tokenizer, "".join(f" w{number}" for number in range(start, start + 40)))
        assert len(tokens._words) <= 400
    long = "x" * 10_000
    agree(tokens, tokenizer, long)
    assert long not in tokens._words


def test_threads_share_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "_WORDS_MAX", 200)  # it is emptied all the time
    tokenizer = trained(None)
    tokens = words_of(tokenizer)
    texts = [" ".join(f"w{(start + number) % 500}" for number in range(30)) for start in range(0, 500, 25)]
    expected = [tokenizer.encode(text).ids for text in texts]
    wrong = []

    def encode() -> None:
        for _ in range(20):
            wrong.extend(
                text for text, ids in zip(texts, expected, strict=True) if tokens.encode(text).tolist() != ids
            )

    threads = [threading.Thread(target=encode) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
