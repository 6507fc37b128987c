"""Texts to tokens, and tokens to texts as they come. Detokenizing step by step gives the same text as decoding all tokens at once."""

import codecs
import re
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np
from tokenizers import Tokenizer

from penstock.core.native import native
from penstock.core.wire import TokenArray
from penstock.frontend.text.source import held_from

REPLACEMENT = "�"
_WINDOW_TOKENS_MAX = 16  # no character takes more tokens: undecodable bytes this long stay so


class TextDecoder(Protocol):
    """Decodes one output's ids. Not thread-safe."""

    def feed(self, token_ids: Iterable[int]) -> str:
        """Decode ids; returns the text that no later id can change."""
        ...

    def finish(self) -> str:
        """Return the text still held back, at the end of the output."""
        ...


class Detokenizer:
    """A model's detokenizer, shared by all its requests; special tokens have no text."""

    def __init__(self, tokenizer: Tokenizer, tokenizer_json: bytes, shown: Collection[str] = ()) -> None:
        """Read the decoder of tokenizer.json; special tokens in `shown` have text, where the decoder has an exact implementation."""
        layout = read_layout(tokenizer_json)
        self._special = frozenset(
            token.id for token in layout.added_tokens if token.special and token.content not in shown
        )
        self.shows_more = any(token.special and token.content in shown for token in layout.added_tokens)
        """Whether the tokenizer has special tokens of `shown`."""
        steps = _flatten(layout.decoder)
        vocabulary: _Vocabulary = tokenizer.id_to_token
        self._token_bytes: Callable[[int], bytes]
        self._new: Callable[[bool], TextDecoder]
        if [step.get("type") for step in steps] == ["ByteLevel"]:
            self._token_bytes = _ByteTable(vocabulary).__getitem__
            self._new = _byte_decoders(_ByteTable(vocabulary, skip=self._special))
        elif (rule := _PieceRule.read(steps)) is not None:
            pieces = _PieceTable(vocabulary, rule, skip=self._special)
            self._token_bytes = _PieceTable(vocabulary, rule).token_bytes
            self._new = lambda begins_text: _PieceDecoder(pieces, begins_text=begins_text)
        else:
            self._token_bytes = lambda token_id: tokenizer.decode(
                [token_id], skip_special_tokens=False
            ).encode()
            special = frozenset(token.id for token in layout.added_tokens if token.special)
            self._new = lambda _: _WindowDecoder(tokenizer, special)

    def stream(self, *, begins_text: bool = True) -> TextDecoder:
        """Create the decoder of one output.

        Args:
            begins_text: True for a chat message: a SentencePiece decoder then drops the space before the first word.
                False for text that continues a prompt.
        """
        return self._new(begins_text)

    def token_bytes(self, token_id: int) -> bytes:
        """Give a token's bytes, including special tokens and partial characters."""
        return self._token_bytes(token_id)


class AddedToken(msgspec.Struct):
    """A token of tokenizer.json that is no word of the vocabulary; the last four say how it is found in a text."""

    id: int
    content: str
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False


class TokenizerModel(msgspec.Struct):
    type: str | None = None
    byte_fallback: bool = False
    dropout: float | None = None


class TokenizerLayout(msgspec.Struct):
    """What tokenizer.json says of how texts are cut, and tokens made texts."""

    model: TokenizerModel = msgspec.field(default_factory=TokenizerModel)
    added_tokens: list[AddedToken] = []
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    decoder: dict[str, Any] | None = None


read_layout = msgspec.json.Decoder(TokenizerLayout).decode


_Vocabulary = Callable[[int], str | None]


def _flatten(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder.get("type") == "Sequence":
        return [step for inner in decoder["decoders"] for step in _flatten(inner)]
    return [decoder]


def _byte_alphabet() -> dict[str, int]:
    """Map GPT-2's printable characters to the bytes they encode.

    Source: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, `bytes_to_unicode`.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()


class _ByteTable(dict[int, bytes]):
    """Bytes by token id, filled on first use; an id outside the vocabulary has none and no entry."""

    def __init__(self, vocabulary: _Vocabulary, skip: frozenset[int] = frozenset()) -> None:
        super().__init__()
        self._vocabulary = vocabulary
        self._skip = skip

    def __missing__(self, token_id: int) -> bytes:
        token = None if token_id < 0 else self._vocabulary(token_id)
        if token is None:
            return b""
        content = self[token_id] = b"" if token_id in self._skip else self._content(token)
        return content

    def look_up(self, token_id: int) -> bytes:
        """Give a token's bytes without an entry, for whoever keeps them."""
        token = None if token_id in self._skip or token_id < 0 else self._vocabulary(token_id)
        return b"" if token is None else self._content(token)

    def _content(self, token: str) -> bytes:
        if all(character in BYTE_OF for character in token):
            return bytes([BYTE_OF[character] for character in token])
        return token.encode()


class ByteDecoder:
    """Byte-level BPE: the tokens' bytes are UTF-8 text; an unfinished character is held back."""

    __slots__ = ("_held", "_table")

    def __init__(self, table: _ByteTable) -> None:
        self._table = table
        self._held = b""

    def feed(self, token_ids: Iterable[int]) -> str:
        table = self._table
        content = self._held + b"".join([table[token_id] for token_id in token_ids])
        text, used = codecs.utf_8_decode(content, "replace", False)
        self._held = content[used:]
        return text

    def finish(self) -> str:
        text = self._held.decode("utf-8", "replace")
        self._held = b""
        return text


def _byte_decoders(table: _ByteTable) -> Callable[[bool], TextDecoder]:
    """Give what makes decoders that share a table; the native ones keep one of their own."""
    if native is None:
        return lambda _: ByteDecoder(table)
    decoder, tokens = native.ByteDecoder, native.TokenTable(table.look_up)
    return lambda _: decoder(tokens)


@dataclass(frozen=True, slots=True)
class _PieceRule:
    """Steps of a SentencePiece-like decoder: replace in each token, join bytes, strip the text's start."""

    replacements: tuple[tuple[str, str], ...]
    byte_fallback: bool
    dropped_in_first: str  # Metaspace: dropped anywhere in the first token
    strip: str  # stripped from the start of the text,
    strip_count: int  # at most this many times

    @classmethod
    def read(cls, steps: Sequence[dict[str, Any]]) -> "_PieceRule | None":
        """Parse (Replace | Metaspace)* ByteFallback? (Fuse Strip?)?; None for any other decoder."""
        remaining = list(steps)
        replacements: list[tuple[str, str]] = []
        dropped = ""
        while remaining and remaining[0]["type"] in {"Replace", "Metaspace"}:
            step = remaining.pop(0)
            if step["type"] == "Metaspace":
                if step.get("prepend_scheme", "always") != "never":
                    dropped = step["replacement"]
                replacements.append((step["replacement"], " "))
            elif "String" in step["pattern"]:
                replacements.append((step["pattern"]["String"], step["content"]))
            else:
                return None
        byte_fallback = bool(remaining) and remaining[0]["type"] == "ByteFallback"
        del remaining[: int(byte_fallback)]
        fused = bool(remaining) and remaining[0]["type"] == "Fuse"
        del remaining[: int(fused)]
        strip, strip_count = "", 0
        if fused and remaining and remaining[0]["type"] == "Strip" and remaining[0]["stop"] == 0:
            step = remaining.pop(0)
            strip, strip_count = step["content"], step["start"]
        if remaining or not steps:
            return None
        return cls(tuple(replacements), byte_fallback, dropped, strip, strip_count)


class _PieceTable(dict[int, "str | int | None"]):
    """By token id: its text, or the byte of a byte token, or None for a special token; an id outside the vocabulary has no entry."""

    def __init__(self, vocabulary: _Vocabulary, rule: _PieceRule, skip: frozenset[int] = frozenset()) -> None:
        super().__init__()
        self._vocabulary = vocabulary
        self._skip = skip
        self.rule = rule

    def __missing__(self, token_id: int) -> str | int | None:
        token = None if token_id < 0 else self._vocabulary(token_id)
        if token is None:
            return None
        piece = self[token_id] = None if token_id in self._skip else self._piece(token)
        return piece

    def _piece(self, token: str) -> str | int:
        for old, new in self.rule.replacements:
            token = token.replace(old, new)
        if self.rule.byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return int(token[3:5], 16)
            except ValueError:
                return token
        return token

    def first(self, token_id: int) -> str | int | None:
        """Give the piece of a token at the start of a text."""
        dropped = self.rule.dropped_in_first
        token = self._vocabulary(token_id)
        if not dropped or token is None or self[token_id] is None:
            return self[token_id]
        return self._piece(token.replace(dropped, ""))

    def token_bytes(self, token_id: int) -> bytes:
        piece = self[token_id]
        return bytes([piece]) if isinstance(piece, int) else (piece or "").encode()


class _PieceDecoder:
    """SentencePiece-like: a run of byte tokens is held until it ends, since one invalid byte makes the whole run invalid."""

    __slots__ = ("_begins", "_run", "_strip_left", "_table")

    def __init__(self, table: _PieceTable, *, begins_text: bool) -> None:
        self._table = table
        self._run = bytearray()
        self._begins = begins_text
        self._strip_left = table.rule.strip_count if begins_text else 0

    def feed(self, token_ids: Iterable[int]) -> str:
        table, run, text = self._table, self._run, ""
        for token_id in token_ids:
            piece = table.first(token_id) if self._begins else table[token_id]
            if piece is None:
                continue
            self._begins = False
            if isinstance(piece, int):
                run.append(piece)
                continue
            if run:
                text += self._end_run()
            text += piece
        return self._strip(text) if self._strip_left else text

    def finish(self) -> str:
        text = self._end_run()
        return self._strip(text) if self._strip_left else text

    def _end_run(self) -> str:
        try:
            text = self._run.decode()
        except UnicodeDecodeError:
            text = REPLACEMENT * len(self._run)
        self._run.clear()
        return text

    def _strip(self, text: str) -> str:
        character = self._table.rule.strip
        while self._strip_left and text.startswith(character):
            text = text.removeprefix(character)
            self._strip_left -= 1
        if text:
            self._strip_left = 0
        return text


class _WindowDecoder:
    """Any other decoder: decodes the newest tokens with and without the last ones, and returns the difference.

    Exact where a token's text depends only on the token before it, special tokens left out.
    """

    __slots__ = ("_ids", "_known", "_special", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, special: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._ids: list[int] = []
        self._known = 0  # leading ids whose text was returned

    def feed(self, token_ids: Iterable[int]) -> str:
        self._ids += [token_id for token_id in token_ids if token_id not in self._special]
        return self._take(hold=True)

    def finish(self) -> str:
        return self._take(hold=False)

    def _take(self, *, hold: bool) -> str:
        decode = self._tokenizer.decode
        text = decode(self._ids)
        if hold and text.endswith(REPLACEMENT) and len(self._ids) - self._known < _WINDOW_TOKENS_MAX:
            return ""
        given = decode(self._ids[: self._known])
        # One token with text stays in the window: a text's first token may decode differently.
        keep = 1
        while keep < len(self._ids) and not decode(self._ids[-keep:]):
            keep += 1
        window = self._ids[-keep:]
        self._ids = [window[0], *window[1:][1 - _WINDOW_TOKENS_MAX :]] if window else window
        self._known = len(self._ids)
        return text[len(given) :]


class StopFinder:
    """Searches one output. The match that ends first wins; among matches with the same end the longest wins."""

    __slots__ = ("_held", "_stops", "found")

    def __init__(self, stops: Sequence[str]) -> None:
        """Args: stops: at least one, none of them empty."""
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None
        """The stop string that was found."""

    def feed(self, text: str) -> tuple[str, bool]:
        """Search the next text.

        Returns:
            (text before any stop string, whether a stop string was found). After a match the rest is dropped, and `feed`
                must not be called again.
        """
        text = self._held + text
        matches = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if matches:
            self._held = ""
            end, at = min(matches)
            self.found = text[at:end]
            return text[:at], True
        keep = min(held_from(text, stop) for stop in self._stops)
        self._held = text[keep:]
        return text[:keep], False

    def finish(self) -> str:
        """Return held-back text: a partial match at the end of the output."""
        text, self._held = self._held, ""
        return text


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
