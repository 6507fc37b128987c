"""API keys and the key file: tenants, the hashes of their keys, and their limits, as YAML.

Only SHA-256 digests of keys are stored: keys are random, so a digest cannot be searched for.
"""

import hashlib
import os
import re
import secrets
from pathlib import Path
from typing import Any, Literal

import pydantic

from penstock.core.config import Config, wrong
from penstock.core.document import parse_yaml
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
    """Read a digest written as `sha256:HEX`; None for any other text."""
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


API_KEY_VARIABLE = "PENSTOCK_API_KEY"
DEFAULT_TENANT = "default"
"""Tenant of the key in PENSTOCK_API_KEY."""
NAME_CHARACTERS_MAX = 256
TENANTS_MAX = 4096
FILE_BYTES_MAX = 4 << 20


class TenantConfig(Config):
    """One tenant: its keys and limits. Limits left out are none."""

    keys: tuple[str, ...] = ()
    """`sha256:HEX` of each key; a key is replaced by two of them until all clients have the new one."""
    requests_per_s: float | None = pydantic.Field(default=None, ge=1e-6)
    """Requests a second; as many as come in one second, and at least one, may come at once. Past it 429."""
    tokens_per_min: int | None = pydantic.Field(default=None, ge=1)
    """Prompt and output tokens a minute; all of a minute's may be used at once. Past it 429."""
    concurrency: int | None = pydantic.Field(default=None, ge=1)
    """Requests in flight at once. Past it 429."""
    priority: Literal["high", "normal", "low"] = "normal"
    """Priority of its requests, and the highest that they may ask for."""
    cache_salt: str | None = pydantic.Field(default=None, max_length=NAME_CHARACTERS_MAX)
    """Tenants with the same one share cached prompts; None: the tenant's name, so it shares none; empty: shares those of requests without keys."""
    link: bool = False
    """Whether this is the tenant of another region's link: its requests go to workers of this region alone, whatever their headers say."""
    trusted: bool = False
    """Whether it is a gateway, whose requests may name another tenant and any priority in headers."""

    @pydantic.field_validator("keys", mode="before")
    @classmethod
    def _check_keys(cls, keys: Any) -> Any:
        if not isinstance(keys, list | tuple):
            raise wrong(f"must be a list; {HOW}")  # the value may be a key: it is not shown
        for number, key in enumerate(keys, start=1):
            if not isinstance(key, str) or stored_digest(key) is None:
                raise wrong(f"number {number} is no `sha256:` with 64 hexadecimal digits; {HOW}")
        return keys


class KeyFile(Config):
    """The whole file."""

    tenants: dict[str, TenantConfig]
    """Tenants by name."""

    @pydantic.field_validator("tenants")
    @classmethod
    def _check_tenants(cls, tenants: dict[str, TenantConfig]) -> dict[str, TenantConfig]:
        if not tenants:
            raise wrong("is empty; name at least one tenant")
        if len(tenants) > TENANTS_MAX:
            raise wrong(f"must be at most {TENANTS_MAX:,}, got {len(tenants):,}")
        owners: dict[str, str] = {}
        for name, tenant in tenants.items():
            if not 1 <= len(name) <= NAME_CHARACTERS_MAX or not name.isprintable():
                raise wrong(
                    f"{name[:40]!r}: a name must have 1 to {NAME_CHARACTERS_MAX} printable characters, got {len(name)}"
                )
            for key in tenant.keys:
                if owners.setdefault(key, name) != name:
                    raise wrong(
                        f"{name!r} and {owners[key]!r} have the same key {key[:15]}...; give each its own"
                    )
        return tenants


def read_tenants(file: str | None) -> dict[str, TenantConfig]:
    """Read the tenants of the key file and, as tenant `default`, the key in PENSTOCK_API_KEY; none if neither is given.

    Raises:
        ConfigError: the file cannot be read or is wrong; the text shows no keys.
    """
    tenants = {} if file is None else dict(_read(Path(file).expanduser()).tenants)
    if given := os.environ.get(API_KEY_VARIABLE, "").strip():
        key = f"sha256:{given_digest(given, API_KEY_VARIABLE).hex()}"
        default = tenants.get(DEFAULT_TENANT, TenantConfig(cache_salt=""))
        tenants[DEFAULT_TENANT] = default.model_copy(update={"keys": (*default.keys, key)})
    return tenants


def _read(path: Path) -> KeyFile:
    source = f"api_key_file: {path}"
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
        if len(content) > FILE_BYTES_MAX:
            raise ConfigError(f"{source}: is larger than {FILE_BYTES_MAX:,} bytes")
        data = parse_yaml(content.decode(), source=source)
    except OSError as error:
        raise ConfigError(f"{source}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source}: is no UTF-8: {error.reason} at byte {error.start}") from error
    if not isinstance(data, dict):
        raise ConfigError(
            f"{source}: must be a mapping, `tenants:` with names, keys and limits (docs/tenants.md); {HOW}"
        )
    return KeyFile.parse(data, source=source)
