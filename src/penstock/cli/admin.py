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

from penstock.core.errors import RequestError, Unavailable
from penstock.core.listening import Address
from penstock.deploy.control.local_connector import FrontendAddress
from penstock.deploy.state import ADMIN_TOKEN_VARIABLE, admin_token_path, load_admin_token
from penstock.frontend.limits.keys import API_KEY_VARIABLE

_TIMEOUT_S = 10.0
_UNAUTHORIZED = 401
_OPERATORS = ("/admin/", "/watch/")
"""Paths that ask for the admin token; the second ones not always."""
_DATA = b"data:"


def ask(
    server: FrontendAddress, path: str, *, body: bytes | None = None, timeout_s: float = _TIMEOUT_S
) -> bytes:
    """Send a GET request, or a POST with a JSON body.

    Raises:
        ConfigError: the admin token's file, or that of the certificate, cannot be read.
        RequestError: the server answered an error; has its status and text. `param` is None if the server is not Penstock.
        Unavailable: no server answers.
    """
    with _answer(server, path, body, timeout_s) as answer:
        content: bytes = answer.read()
        return content


def ask_stream(
    server: FrontendAddress, path: str, *, body: bytes | None = None, timeout_s: float = _TIMEOUT_S
) -> Generator[bytes]:
    """Send a request and yield the data of each server-sent event as it comes; raises as `ask`.

    Args:
        timeout_s: longest time without a byte.
    """
    with _answer(server, path, body, timeout_s) as answer:
        for line in answer:
            if line.startswith(_DATA):
                yield line[len(_DATA) :].strip()


@contextmanager
def _answer(server: FrontendAddress, path: str, body: bytes | None, timeout_s: float) -> Iterator[Any]:
    """Send a request; errors while its answer is read are raised as `ask` says."""
    base = server.url
    headers = {} if body is None else {"Content-Type": "application/json"}
    if secret := _secret_for(server, path):
        headers["Authorization"] = f"Bearer {secret}"
    request = urllib.request.Request(base + path, data=body, headers=headers)  # noqa: S310 - checked
    try:
        with _opener(server).open(request, timeout=timeout_s) as answer:
            yield answer
    except urllib.error.HTTPError as error:
        message, param = _error_of(error)
        if location := error.headers.get("Location"):
            message = f"{server}: redirects to {location!r}, which gets no key or token; name the server itself by --url"
        if error.code == _UNAUTHORIZED and path.startswith(_OPERATORS):
            message = _wrong_token() if secret else _no_token(server)
        raise RequestError(message, http_status=error.code, param=param) from error
    except (OSError, http.client.HTTPException) as error:
        raise _unreached(server, error) from error


def _opener(server: FrontendAddress) -> urllib.request.OpenerDirector:
    """Make what connects to the server itself: a redirect is an error, and no proxy is asked for this machine, as both would get the secret."""
    handlers: list[urllib.request.BaseHandler] = [_NoRedirect()]
    if server.url.startswith("https:"):
        handlers.append(urllib.request.HTTPSHandler(context=server.tls()))
    if server.name is not None or _is_here(server):
        handlers.append(urllib.request.ProxyHandler({}))
    return urllib.request.build_opener(*handlers)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def _unreached(server: FrontendAddress, error: OSError | http.client.HTTPException) -> Unavailable:
    """Say why no server answered, and the fix."""
    reason = getattr(error, "reason", error)
    if isinstance(reason, ssl.SSLCertVerificationError):
        if server.certificate is not None:
            return Unavailable(
                f"{server}: its certificate is refused ({reason.verify_message}); renew {server.certificate}, which the frontend then reads anew"
            )
        return Unavailable(
            f"{server}: its certificate is not trusted ({reason.verify_message}); set SSL_CERT_FILE to the certificate of the"
            " authority that signed it, or to itself, and use a host name that it has"
        )
    if isinstance(reason, ssl.SSLError):
        return Unavailable(
            f"{server}: no TLS connection ({reason}); if the server has no certificate, use http://"
        )
    if isinstance(reason, http.client.HTTPException) and server.url.startswith("http:"):
        return Unavailable(
            f"{server}: no answer in HTTP ({reason}); if the server has a certificate, use https://"
        )
    if server.is_guess:
        return Unavailable(
            f"no deployment of this user has a frontend on this host, and nobody answers at {server} ({reason}); start one with"
            " penstock serve, or name a server by --url"
        )
    return Unavailable(
        f"{server}: nobody answers ({reason}); is it started? penstock ps on its host shows its URL"
    )


def _secret_for(server: FrontendAddress, path: str) -> str:
    """Give the bearer token for a path.

    The admin token in this user's file is sent to this machine only, and where no deployment of this user was found only to a
    server that `--url` names: another user may listen at the usual port.
    """
    if not path.startswith(_OPERATORS):
        return os.environ.get(API_KEY_VARIABLE, "").strip()
    if given := os.environ.get(ADMIN_TOKEN_VARIABLE, "").strip():
        return given
    if server.is_guess or not _is_here(server) or not admin_token_path().exists():
        return ""
    return load_admin_token()


def _is_here(server: FrontendAddress) -> bool:
    return Address(host=urlsplit(server.url).hostname or "").is_local


def _no_token(server: FrontendAddress) -> str:
    """Describe why no admin token was sent, and how to set one."""
    path = admin_token_path()
    if server.is_guess:
        return (
            f"no deployment of this user was found on this host, so {server.url} was not sent the admin token in {path}; if it is"
            f" yours, repeat with --url {server.url}"
        )
    if _is_here(server):
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
