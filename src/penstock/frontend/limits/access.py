"""API keys for the API, one token for `/admin`. A local connection is no proof of identity: proxies and browsers are local too."""

import hmac
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.core.errors import ConfigError
from penstock.frontend.errors import AdminTokenError, ApiKeyError

API_KEY_VARIABLE = "PENSTOCK_API_KEY"
_SCHEME = "bearer "
_KEY_CHARACTERS_MAX = 512


class Access:
    """Checks bearer tokens in constant time. Immutable."""

    def __init__(self, *, api_keys: Sequence[str] = (), admin_token: str = "") -> None:
        """Set the accepted keys: without API keys the API is open, without a token `/admin` is closed."""
        self._api_keys = [key.encode() for key in api_keys]
        self._admin_token = admin_token.encode()

    def check_api(self, headers: Mapping[str, str]) -> None:
        """Raises: ApiKeyError: API keys are set and the request has none of them."""
        if self._api_keys and not _is_one_of(_bearer(headers), self._api_keys):
            raise ApiKeyError(
                "Authorization: must be 'Bearer KEY' with an API key of this server; ask who runs it for one",
            )

    def check_admin(self, headers: Mapping[str, str]) -> None:
        """Raises: AdminTokenError: the request lacks the token."""
        if not self._admin_token or not _is_one_of(_bearer(headers), [self._admin_token]):
            raise AdminTokenError(
                "Authorization: must be 'Bearer TOKEN' with the admin token: PENSTOCK_ADMIN_TOKEN of the server, else what is"
                " in the file admin_token of its state directory",
            )


def load_api_keys(file: str | None) -> tuple[str, ...]:
    """Read the API keys: one per line of a file, and PENSTOCK_API_KEY.

    Raises:
        ConfigError: the file cannot be read or is empty, or a key cannot stand in a header.
    """
    keys: list[str] = []
    if given := os.environ.get(API_KEY_VARIABLE, "").strip():
        keys.append(_checked(given, API_KEY_VARIABLE))
    if file is not None:
        try:
            lines = Path(file).expanduser().read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise ConfigError(f"api_key_file: {file}: {reason}") from error
        found = [
            _checked(line.strip(), f"api_key_file: {file}:{number}")
            for number, line in enumerate(lines, start=1)
            if line.strip()
        ]
        if not found:
            raise ConfigError(f"api_key_file: {file}: is empty; expected one key a line")
        keys += found
    return tuple(keys)


def _checked(key: str, source: str) -> str:
    expected = f"a key must have up to {_KEY_CHARACTERS_MAX} printable ASCII characters without spaces"
    for place, character in enumerate(key, start=1):
        if not (character.isascii() and character.isprintable()) or character == " ":
            raise ConfigError(f"{source}: {expected}; character {place} is {character!a}")
    if len(key) > _KEY_CHARACTERS_MAX:
        raise ConfigError(f"{source}: {expected}, got one of {len(key):,}")
    return key


def _bearer(headers: Mapping[str, str]) -> bytes:
    value = headers.get("Authorization", "")
    if value[: len(_SCHEME)].lower() != _SCHEME:
        return b""
    return value[len(_SCHEME) :].strip().encode("utf-8", "surrogateescape")


def _is_one_of(given: bytes, known: Sequence[bytes]) -> bool:
    matches = [hmac.compare_digest(given, key) for key in known]  # compares all, for constant time
    return any(matches)
