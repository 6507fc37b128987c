"""Tokenizes texts word by word where the model allows it, and bounds a text's tokens by its size."""

import re
from array import array
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from penstock.core.wire import TokenArray
from penstock.frontend.text.detokenize import BYTE_OF, TokenizerLayout, read_layout

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""What a `ByteLevel` step with `use_regex` cuts by."""
_ASCII_OF = {
    "L": "a-zA-Z",
    "N": "0-9",
    "Lu": "A-Z",
    "Ll": "a-z",
    **dict.fromkeys(("Lt", "Lm", "Lo", "M"), "\u0100"),
}
"""Characters of Unicode categories below 128; for a category without any, one that no ASCII text has."""
_WORDS_MAX = 1 << 15
"""Cached words; about 5 MB."""
_WORD_CHARACTERS_MAX = 64
_NEW_WORDS_MAX = 64
"""Words that one text may add. A text with more goes to the tokenizer as a whole, which is then as fast."""
_TEXT_CHARACTERS_MAX = 1 << 14
"""Longer texts go to the tokenizer as a whole, in a thread: only that leaves the GIL to the event loop."""
_BYTE_LEVEL = {byte: character for character, byte in BYTE_OF.items() if byte < 128}
"""What a byte-level model has for each character of ASCII."""
_PROBES = (
    "The quick brown fox's 3 lazy dogs don't jump: 12345 times!\n\n  if x == 'y':\r\n\treturn {\"a\": [1, 2.5]}  \n",
    "I'LL say WE'VE seen camelCase, snake_case and http://example.com/a?b=c&d=%20   \t\t<tag attr=\"v\"/> ...",
    " leading, trailing \n\n\n\x00\x1c\x1f\x7f\x0b\x0c ~~~ ---- ____ '''\"\"\"``` 'tis 'S 'Re 000 0001 1000000 a1b2c3  ",
)
"""Text on which both ways have to agree before words are used."""


class WordTokens:
    """The tokens of words and of special tokens, for one model. Threads may share it."""

    def __init__(self, tokenizer: Tokenizer, tokenizer_json: bytes) -> None:
        """Find out whether the model's text can be cut into words; `encode` always works."""
        self._tokenizer = tokenizer
        self._model = tokenizer.model
        self._words: dict[str, bytes] = {}
        self._special: dict[str, bytes] = {}
        self._cut_special: re.Pattern[str] | None = None
        self._before, self._after = self._around()
        self._cut = self._pattern(read_layout(tokenizer_json))
        if self._cut is not None and not all(self._agrees(probe) for probe in _PROBES):
            self._cut = None

    @property
    def cuts_words(self) -> bool:
        """Whether ASCII text goes word by word."""
        return self._cut is not None

    def encode(self, text: str, *, special: bool = False) -> TokenArray:
        """Tokenize a text, with the special tokens that the tokenizer puts around it or not.

        Returns:
            (num_tokens,) int32, perhaps read-only.
        """
        if self._cut is None or len(text) > _TEXT_CHARACTERS_MAX or not text.isascii():
            return self._encode_whole(text, special=special)
        words: list[str] = []
        for index, part in enumerate([text] if self._cut_special is None else self._cut_special.split(text)):
            if index % 2:
                words.append(part)
            else:
                words += self._cut.findall(part)
        tokens = self._words
        try:
            packed = b"".join([tokens[word] for word in words])
        except KeyError:
            packed = self._encode_new(text, words)
        if special:
            packed = self._before + packed + self._after
        return np.frombuffer(packed, dtype=np.int32)

    def _encode_new(self, text: str, words: list[str]) -> bytes:
        """Give the packed tokens of a text of which some words are not cached, and cache them."""
        known = self._words
        new = list(set(words).difference(known))
        learned = new[:_NEW_WORDS_MAX]
        fresh = {word: self._encode_word(word) for word in learned}
        if len(known) + len(fresh) > _WORDS_MAX:
            self._words = dict(self._special)  # a thread that reads the old one goes on with it
        self._words.update(
            (word, tokens) for word, tokens in fresh.items() if len(word) <= _WORD_CHARACTERS_MAX
        )
        if len(new) > len(learned):
            return self._encode_whole(text, special=False).tobytes()
        return b"".join([fresh[word] if word in fresh else known[word] for word in words])

    def _encode_word(self, word: str) -> bytes:
        """Give the packed tokens of a word: by the model's merges alone, as it is cut and normalized already."""
        if len(word) > _WORD_CHARACTERS_MAX:
            return self._encode_whole(word, special=False).tobytes()
        return _packed([token.id for token in self._model.tokenize(word.translate(_BYTE_LEVEL))])

    def _encode_whole(self, text: str, *, special: bool) -> TokenArray:
        # Only the batch calls release the GIL; the fast one skips character offsets.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)
        return np.array(encoding.ids, dtype=np.int32)

    def _pattern(self, layout: TokenizerLayout) -> re.Pattern[str] | None:
        """Give what matches each word of ASCII text; None where the model does not cut it so."""
        added = [token for token in layout.added_tokens if token.content.isascii() and token.content]
        if layout.model.type != "BPE" or layout.model.dropout or not _keeps_ascii(layout.normalizer):
            return None
        if any(token.lstrip or token.rstrip or token.single_word for token in added):
            return None  # they take white space around them
        if len({token.normalized for token in added}) > 1:
            return None  # the tokenizer looks for one kind after the other
        pattern = _ascii_pattern(layout.pre_tokenizer)
        if pattern is None:
            return None
        longest_first = sorted((token.content for token in added), key=len, reverse=True)
        if longest_first:
            self._cut_special = re.compile(f"({'|'.join(map(re.escape, longest_first))})")
        for content in longest_first:
            token_id = self._tokenizer.token_to_id(content)
            if token_id is None:
                return None
            self._special[content] = _packed([token_id])
        self._words = dict(self._special)
        return pattern

    def _agrees(self, text: str) -> bool:
        return all(
            np.array_equal(self.encode(each, special=special), self._encode_whole(each, special=special))
            for each in (text, text.swapcase(), text.join(self._special))
            for special in (False, True)
        )

    def _around(self) -> tuple[bytes, bytes]:
        """Give the packed special tokens that the tokenizer puts before and after a text."""
        plain = self._encode_whole("a", special=False).tobytes()
        before, _, after = self._encode_whole("a", special=True).tobytes().partition(plain)
        return before, after


def _packed(token_ids: list[int]) -> bytes:
    return array("i", token_ids).tobytes()


def _keeps_ascii(normalizer: dict[str, Any] | None) -> bool:
    """Say whether a normalizer leaves ASCII text as it is."""
    if normalizer is None or normalizer.get("type") in {"NFC", "NFKC", "NFD", "NFKD"}:
        return True
    return normalizer.get("type") == "Sequence" and all(map(_keeps_ascii, normalizer["normalizers"]))


def _ascii_pattern(pre_tokenizer: dict[str, Any] | None) -> re.Pattern[str] | None:
    """Give the expression of a byte-level pre-tokenizer, for ASCII text; None for any other."""
    if pre_tokenizer is None:
        return None
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer.get("type") == "Sequence" else [pre_tokenizer]
    *splits, last = steps
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space", True):
        return None
    sources = [_source_of(step) for step in splits] + ([_GPT2] if last.get("use_regex", True) else [])
    if len(sources) != 1 or sources[0] is None:
        return None
    ascii_source = re.sub(r"\\p\{(\w+)\}", _ascii_category, sources[0])
    if r"\p" in ascii_source or r"\P" in ascii_source:
        return None
    try:
        pattern = re.compile(ascii_source, re.ASCII)
    except re.error:
        return None
    return pattern if not pattern.groups else None


def _source_of(step: dict[str, Any]) -> str | None:
    """Give the expression whose matches a step isolates; None for any other step."""
    if step.get("type") != "Split" or step.get("behavior") != "Isolated" or step.get("invert"):
        return None
    source: str | None = step["pattern"].get("Regex")
    return source


def _ascii_category(match: re.Match[str]) -> str:
    """Replace a category by its characters below 128, in brackets unless it stands in some."""
    characters = _ASCII_OF.get(match[1])
    if characters is None:
        return match[0]
    before = match.string[: match.start()]
    in_brackets = before.count("[") - before.count(r"\[") > before.count("]") - before.count(r"\]")
    return characters if in_brackets else f"[{characters}]"


_SPACES = tuple(filter(str.isspace, map(chr, range(0x3001))))  # the last is U+3000
_SPACE_BYTES = tuple(character.encode() for character in _SPACES)
_NFC_SHRINKS_MAX = 4  # U+03B9 U+0308 U+0301, in their longest forms, are 7 bytes and become 2
_DROPS_NOTHING = frozenset({"ByteLevel", "Metaspace", "Split", "Digits", "Punctuation"})


class LengthBound:
    """Bounds token counts by the longest token of the vocabulary. Immutable.

    White space is ignored in tokens and texts: an added token may absorb any amount of white space around it. A
    tokenizer that may drop or merge other text (BERT's, or one that maps all unknown text to one token) has bound 0.
    """

    def __init__(self, tokenizer: Tokenizer, tokenizer_json: bytes) -> None:
        layout = read_layout(tokenizer_json)
        self._shrinks_max = _shrinks_max(_steps_of(layout.normalizer))
        steps = _steps_of(layout.pre_tokenizer)
        keeps_all = all(
            step.get("type") in _DROPS_NOTHING and step.get("behavior") != "Removed" for step in steps
        )
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        by_bytes = any(step.get("type") == "ByteLevel" for step in steps)
        knows_all = layout.model.type in {"BPE", "Unigram"} and (
            BYTE_OF.keys() <= vocabulary.keys()
            if by_bytes
            else layout.model.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
        )
        added = {token.content for token in layout.added_tokens}
        self._token_bytes_max = (
            _longest(vocabulary, added, by_bytes=by_bytes)
            if keeps_all and knows_all and self._shrinks_max
            else None
        )

    def tokens_min(self, text: str) -> int:
        """Give a lower bound of the text's tokens."""
        if self._token_bytes_max is None:
            return 0
        size = len(text.encode()) - sum(
            text.count(space) * len(content) for space, content in zip(_SPACES, _SPACE_BYTES, strict=True)
        )
        each = self._token_bytes_max * (1 if text.isascii() else self._shrinks_max)
        return -(-size // each)


def _steps_of(step: dict[str, Any] | None) -> list[dict[str, Any]]:
    if step is None:
        return []
    if step.get("type") == "Sequence":
        inner = step.get("normalizers") or step.get("pretokenizers") or []
        return [leaf for each in inner for leaf in _steps_of(each)]
    return [step]


def _shrinks_max(normalizers: list[dict[str, Any]]) -> int:
    """Give the factor by which these can shrink a text at most; 0 is unbounded."""
    factor = 1
    for step in normalizers:
        pattern, content = step.get("pattern"), step.get("content")
        if step.get("type") == "NFC":
            factor *= _NFC_SHRINKS_MAX
        elif step.get("type") == "Replace" and isinstance(pattern, dict) and isinstance(content, str):
            if "String" not in pattern or _size(content.encode()) < _size(pattern["String"].encode()):
                return 0
        elif step.get("type") != "Prepend":
            return 0
    return factor


def _longest(vocabulary: dict[str, int], added: set[str], *, by_bytes: bool) -> int:
    longest = 1
    for token in vocabulary:
        if by_bytes and token not in added and all(character in BYTE_OF for character in token):
            content = bytes([BYTE_OF[character] for character in token])
        else:
            content = token.encode()
        if len(content) > longest:
            longest = max(longest, _size(content))
    return longest


def _size(content: bytes) -> int:
    return len(content) - sum(content.count(space) * len(space) for space in _SPACE_BYTES)
