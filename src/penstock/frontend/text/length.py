"""A lower bound of a text's token count from its size alone, to refuse oversized texts without tokenizing them."""

from typing import Any

import msgspec
from tokenizers import Tokenizer

from penstock.frontend.text.detokenize import BYTE_OF

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
        layout = msgspec.json.decode(tokenizer_json, type=_Layout)
        self._shrinks_max = _shrinks_max(_flatten(layout.normalizer))
        steps = _flatten(layout.pre_tokenizer)
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


class _AddedToken(msgspec.Struct):
    content: str


class _Model(msgspec.Struct):
    type: str | None = None
    byte_fallback: bool = False


class _Layout(msgspec.Struct):
    """The fields of tokenizer.json that decide how text is normalized and split."""

    model: _Model
    added_tokens: list[_AddedToken] = []
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None


def _flatten(step: dict[str, Any] | None) -> list[dict[str, Any]]:
    if step is None:
        return []
    if step.get("type") == "Sequence":
        inner = step.get("normalizers") or step.get("pretokenizers") or []
        return [leaf for each in inner for leaf in _flatten(each)]
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
