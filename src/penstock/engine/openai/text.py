"""Text to token ids and back, for servers that take or give text.

An answer's text becomes token ids whose detokenized text is the same; how many they are is approximate. A prompt's ids
become the text that the server's tokenizer turns into the same ids.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from penstock.core.errors import ConfigError

_CACHED_MAX = 65536
_CACHED_CHARACTERS_MAX = 64
_ANCHORS = ("a", "\n", ".")


class TextCodec:
    """A model's tokenizer, used both ways. Not thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(
            number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )
        self._lead = tuple(tokenizer.encode("", add_special_tokens=True).ids)
        self._anchor = self._find_anchor()
        self._anchor_text = self._decode([self._anchor])
        self._byte_ids = _byte_ids(tokenizer)
        self._known: OrderedDict[str, tuple[int, ...]] = OrderedDict()

    @classmethod
    def open(cls, directory: str) -> "TextCodec":
        """Load tokenizer.json of a directory.

        Raises:
            ConfigError: there is none, or it cannot be read.
        """
        path = Path(directory).expanduser() / "tokenizer.json"
        try:
            return cls(Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises bare exceptions
            raise ConfigError(f"{path}: not a tokenizer that can be read ({error})") from error

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def prompt_text(self, token_ids: Sequence[int]) -> str:
        """Decode a prompt, special tokens included, without those that a server puts before every text."""
        lead = self._lead
        skip = len(lead) if lead and tuple(token_ids[: len(lead)]) == lead else 0
        return self._tokenizer.decode(list(token_ids[skip:]), skip_special_tokens=False)

    def tokenize(self, text: str) -> list[int]:
        """Tokenize a text as a server does without special tokens around it."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def spell(self, text: str) -> tuple[int, ...]:
        """Give token ids that detokenize to this text, in the middle of an output.

        The tokenizer's own ids where they do; else its ids of each character, or bytes. Special tokens are never used,
        since they have no text. Where a tokenizer has no ids for a character, that of its unknown token or nothing.
        """
        if not text:
            return ()
        known = self._known.get(text)
        if known is not None:
            self._known.move_to_end(text)
            return known
        spelled = self._whole(text)
        if spelled is None:
            spelled = tuple(token_id for character in text for token_id in self._character(character))
        if len(text) <= _CACHED_CHARACTERS_MAX:
            self._known[text] = spelled
            if len(self._known) > _CACHED_MAX:
                self._known.popitem(last=False)
        return spelled

    def _whole(self, text: str) -> tuple[int, ...] | None:
        """Tokenize a text, alone or after the anchor; None where neither decodes to it."""
        alone = tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)
        if self._says(alone, text):
            return alone
        after = tuple(self._tokenizer.encode(self._anchor_text + text, add_special_tokens=False).ids)
        if after and self._decode([after[0]]) == self._anchor_text and self._says(after[1:], text):
            return after[1:]
        return None

    def _character(self, character: str) -> tuple[int, ...]:
        known = self._known.get(character)
        if known is not None:
            return known
        whole = self._whole(character)
        if whole is None:
            spelled = tuple(self._byte_ids[byte] for byte in character.encode() if byte in self._byte_ids)
            whole = spelled if self._says(spelled, character) else tuple(self.tokenize(character))
            whole = tuple(token_id for token_id in whole if token_id not in self._special)
        return whole

    def _says(self, token_ids: tuple[int, ...], text: str) -> bool:
        """Say whether ids in the middle of an output are this text and nothing else, and end on a whole character."""
        if not token_ids or not self._special.isdisjoint(token_ids):
            return False
        return self._decode([self._anchor, *token_ids, self._anchor]) == (
            self._anchor_text + text + self._anchor_text
        )

    def _find_anchor(self) -> int:
        """Find a token that decodes to the same text at the start of a text and after itself."""
        for text in _ANCHORS:
            ids = self._tokenizer.encode(text + text, add_special_tokens=False).ids
            for token_id in (*ids[-1:], self._tokenizer.token_to_id(text)):
                if token_id is None or token_id in self._special:
                    continue
                once = self._decode([token_id])
                if once and self._decode([token_id, token_id]) == once + once:
                    return int(token_id)
        raise ConfigError(
            "engine openai: this model's tokenizer joins tokens by more than their text, so text from a server cannot be"
            " turned into token ids; use a server that gives token ids (vLLM, SGLang, TensorRT-LLM, llama.cpp)"
        )

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))


def _byte_ids(tokenizer: Tokenizer) -> dict[int, int]:
    """Find the tokens that stand for one byte: `<0xE2>` of SentencePiece, or one character of GPT-2's alphabet."""
    named: Callable[[int], str]
    if tokenizer.token_to_id("<0xE2>") is not None:
        named = "<0x{:02X}>".format
    else:
        alphabet = _byte_alphabet()
        named = alphabet.__getitem__
    found = {byte: tokenizer.token_to_id(named(byte)) for byte in range(256)}
    return {byte: token_id for byte, token_id in found.items() if token_id is not None}


def _byte_alphabet() -> dict[int, str]:
    """Map bytes to the printable characters that stand for them.

    Source: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, `bytes_to_unicode`.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(0x100) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + n) for n, byte in enumerate(others)}
