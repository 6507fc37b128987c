"""API keys, of which only SHA-256 digests are stored: keys are random, so a digest cannot be searched for."""

import hashlib
import re
import secrets

from penstock.core.errors import ConfigError

CHARACTERS_MAX = 512
PREFIX = "sha256:"
_HASH = re.compile(r"sha256:[0-9a-f]{64}")
_KEY_BYTES = 32
HOW = "write the line `sha256:...` that `penstock key` prints with a new key, or `printf %s KEY | sha256sum`"


def new_key() -> str:
    """Draw a key of 256 random bits."""
    return f"sk-{secrets.token_urlsafe(_KEY_BYTES)}"


def digest_of(key: bytes) -> bytes:
    """Hash a key as a client sent it."""
    return hashlib.sha256(key).digest()


def hash_of(key: str) -> str:
    """Give the text that stands for a key in a key file."""
    return PREFIX + digest_of(key.encode()).hex()


def stored_digest(text: str) -> bytes | None:
    """Read `sha256:HEX`; None if the text is none."""
    return bytes.fromhex(text[len(PREFIX) :]) if _HASH.fullmatch(text) else None


def given_digest(text: str, source: str) -> bytes:
    """Read a key, or its `sha256:HEX`.

    Raises:
        ConfigError: it could not stand in a header. The text does not show the key.
    """
    expected = f"a key must have up to {CHARACTERS_MAX} printable ASCII characters without spaces"
    for place, character in enumerate(text, start=1):
        if not (character.isascii() and character.isprintable()) or character == " ":
            raise ConfigError(f"{source}: {expected}; character {place} is {character!a}")
    if len(text) > CHARACTERS_MAX:
        raise ConfigError(f"{source}: {expected}, got one of {len(text):,}")
    return stored_digest(text) or digest_of(text.encode())
