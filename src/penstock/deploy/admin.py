"""Asks a running deployment over its HTTP API, for commands."""

import http.client
import json
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlsplit

from penstock.core.errors import ConfigError, RequestError, Unavailable

_TIMEOUT_S = 10.0


def base_of(url: str) -> str:
    """Give the URL that paths are put behind.

    Raises:
        ConfigError: this is no URL.
    """
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
        raise ConfigError(f"--url: {url!r}: expected a URL such as http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix("/v1")


def ask(base: str, path: str, *, body: bytes | None = None, timeout_s: float = _TIMEOUT_S) -> bytes:
    """Get an answer, or with a body of JSON post it.

    Raises:
        RequestError: the server refuses; with its status, and what it says. `param` is None where it is no Penstock.
        Unavailable: nobody answers there.
    """
    headers = {} if body is None else {"Content-Type": "application/json"}
    request = urllib.request.Request(base + path, data=body, headers=headers)  # noqa: S310 - checked
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:  # noqa: S310 - checked
            content: bytes = answer.read()
            return content
    except urllib.error.HTTPError as error:
        message, param = _error_of(error)
        raise RequestError(message, http_status=error.code, param=param) from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise Unavailable(f"--url: {base}: nobody answers ({reason}); is it started?") from error


def _error_of(error: urllib.error.HTTPError) -> tuple[str, str | None]:
    """Give an error's message, and what it is about; of a server that is not Penstock, only the status."""
    try:
        body: dict[str, Any] = json.loads(error.read())["error"]
        return str(body["message"]), body.get("param")
    except (ValueError, KeyError, TypeError):
        return f"answers {error.code} {error.reason}", None
