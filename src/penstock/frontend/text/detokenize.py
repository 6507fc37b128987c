"""Incremental detokenizing, with the same text as decoding all tokens at once.

The decoder in tokenizer.json runs incrementally: text is given out as soon as no later token can change it.
Byte-level BPE (GPT-2, Llama 3, Qwen) and SentencePiece-like decoders (Llama 2, Mistral, Gemma) have exact
implementations; any other decoder runs in a sliding window.
"""

import codecs
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from tokenizers import Tokenizer

from penstock.core.native import native
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
    """Searches one output. The match that ends first wins; of matches with the same end, the longest."""

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
