"""HTTP requests of commands to a running deployment."""

import http.client
import json
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from penstock.core.errors import ConfigError, RequestError, Unavailable
from penstock.core.net.address import Address
from penstock.deploy.state import ADMIN_TOKEN_VARIABLE, admin_token_path, load_admin_token
from penstock.frontend.tenants.key_file import API_KEY_VARIABLE

DEFAULT_URL = "http://127.0.0.1:8000"
"""Where commands look for a server unless `--url` says otherwise."""
_TIMEOUT_S = 10.0
_UNAUTHORIZED = 401
_OPERATORS = ("/admin/", "/watch/")
"""Paths that ask for the admin token; the second ones not always."""
_DATA = b"data:"


def base_of(url: str) -> str:
    """Give the base URL, to which paths are appended.

    Raises:
        ConfigError: `url` is no URL.
    """
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
        raise ConfigError(f"--url: {url!r}: expected a URL such as http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix("/v1")


def ask(base: str, path: str, *, body: bytes | None = None, timeout_s: float = _TIMEOUT_S) -> bytes:
    """Send a GET request, or a POST with a JSON body.

    Raises:
        ConfigError: the admin token's file cannot be read.
        RequestError: the server answered an error; has its status and text. `param` is None if the server is not Penstock.
        Unavailable: no server answers at `base`.
    """
    with _answer(base, path, body, timeout_s) as answer:
        content: bytes = answer.read()
        return content


def ask_stream(
    base: str, path: str, *, body: bytes | None = None, timeout_s: float = _TIMEOUT_S
) -> Generator[bytes]:
    """Send a request and yield the data of each server-sent event as it comes; raises as `ask`.

    Args:
        timeout_s: longest time without a byte.
    """
    with _answer(base, path, body, timeout_s) as answer:
        for line in answer:
            if line.startswith(_DATA):
                yield line[len(_DATA) :].strip()


@contextmanager
def _answer(base: str, path: str, body: bytes | None, timeout_s: float) -> Iterator[Any]:
    """Send a request; errors while its answer is read are raised as `ask` says."""
    headers = {} if body is None else {"Content-Type": "application/json"}
    if secret := _secret_for(base, path):
        headers["Authorization"] = f"Bearer {secret}"
    request = urllib.request.Request(base + path, data=body, headers=headers)  # noqa: S310 - checked
    try:
        with urllib.request.urlopen(request, timeout=timeout_s, context=_trust(base)) as answer:  # noqa: S310 - checked
            yield answer
    except urllib.error.HTTPError as error:
        message, param = _error_of(error)
        if error.code == _UNAUTHORIZED and path.startswith(_OPERATORS):
            message = _wrong_token() if secret else _no_token(base)
        raise RequestError(message, http_status=error.code, param=param) from error
    except (OSError, http.client.HTTPException) as error:
        raise _unreached(base, error) from error


def _trust(base: str) -> ssl.SSLContext | None:
    """Trust the system's authorities or SSL_CERT_FILE, which may be the server's own certificate, whoever signed it."""
    if urlsplit(base).scheme != "https":
        return None
    context = ssl.create_default_context()
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def _unreached(base: str, error: OSError | http.client.HTTPException) -> Unavailable:
    """Say why no server answered at `base`, and the fix."""
    reason = getattr(error, "reason", error)
    if isinstance(reason, ssl.SSLCertVerificationError):
        return Unavailable(
            f"--url: {base}: its certificate is not trusted ({reason.verify_message}); set SSL_CERT_FILE to the certificate of the"
            " authority that signed it, or to itself, and use a host name that it has"
        )
    if isinstance(reason, ssl.SSLError):
        return Unavailable(
            f"--url: {base}: no TLS connection ({reason}); if the server has no certificate, use http://"
        )
    if isinstance(reason, http.client.HTTPException) and urlsplit(base).scheme == "http":
        return Unavailable(
            f"--url: {base}: no answer in HTTP ({reason}); if the server has a certificate, use https://"
        )
    return Unavailable(
        f"--url: {base}: nobody answers ({reason}); is it started? penstock ps on its host shows its URL"
    )


def _secret_for(base: str, path: str) -> str:
    """Give the bearer token for a path. The admin token in this user's file is sent to this machine only."""
    if not path.startswith(_OPERATORS):
        return os.environ.get(API_KEY_VARIABLE, "").strip()
    if given := os.environ.get(ADMIN_TOKEN_VARIABLE, "").strip():
        return given
    host = urlsplit(base).hostname or ""
    if not Address(host=host).is_local or not admin_token_path().exists():
        return ""
    return load_admin_token()


def _no_token(base: str) -> str:
    """Describe why no admin token was sent to `base`, and how to set one."""
    path = admin_token_path()
    if Address(host=urlsplit(base).hostname or "").is_local:
        return f"no admin token in {path}; run as the server's user, or set {ADMIN_TOKEN_VARIABLE}"
    return f"the admin token in {path} is sent to this machine only; set {ADMIN_TOKEN_VARIABLE} to that of the server"


def _wrong_token() -> str:
    """Describe where the refused admin token came from."""
    path = admin_token_path()
    if os.environ.get(ADMIN_TOKEN_VARIABLE, "").strip():
        return (
            f"the server refuses the admin token in {ADMIN_TOKEN_VARIABLE}; set it to that of the server, or unset it to send"
            f" that in {path}"
        )
    return f"the server refuses the admin token in {path}; set {ADMIN_TOKEN_VARIABLE} to that of the server"


def _error_of(error: urllib.error.HTTPError) -> tuple[str, str | None]:
    """Give an error's (message, param); for a server that is not Penstock, the HTTP status and None."""
    try:
        body: dict[str, Any] = json.loads(error.read())["error"]
        return str(body["message"]), body.get("param")
    except (ValueError, KeyError, TypeError):
        return f"answers {error.code} {error.reason}", None
