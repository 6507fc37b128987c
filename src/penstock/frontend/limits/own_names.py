"""By which names a server may be asked, so that no web page reaches it through the browser of somebody on its host.

A page of another site may send requests to `localhost` without asking first, and by DNS rebinding it may read the answers:
its own name then stands for 127.0.0.1. A browser tells both: in `Origin`, and in `Host`.
"""

import ipaddress
from collections.abc import Sequence
from functools import lru_cache
from urllib.parse import urlsplit

from aiohttp import web

from penstock.core.listening import Address
from penstock.frontend.errors import ForbiddenError

_NAME_CHARACTERS_MAX = 100
_ANY = "*"


class OwnNames:
    """Checks `Host` and `Origin` of requests to a server that listens on loopback, or that was given names. Immutable."""

    def __init__(
        self, host: str, hosts: Sequence[str], *, setting: str, origins: Sequence[str] = (), pages: str = ""
    ) -> None:
        """Make the check of one listener.

        Args:
            host: where it listens.
            hosts: names by which it may be asked, beside `localhost` and IP addresses; `*` is any.
            setting: has these names, for errors.
            origins: of pages that may use the API.
            pages: the setting that has them, for errors; empty: the same.
        """
        self._is_on = Address(host=host).is_local or bool(hosts)
        self._host = host
        self._hosts = frozenset(name.lower() for name in hosts)
        self._setting = setting
        self._pages = pages or setting
        self._origins = frozenset(origins)
        self._may_ask_as = lru_cache(maxsize=256)(lambda host: self._is_own(name_of(host)))

    def check(self, request: web.BaseRequest, *, for_pages: bool = True) -> None:
        """Check a request; `for_pages`: pages of `origins` may send it.

        Raises:
            ForbiddenError: a page of another site sends it, or may read the answer.
        """
        if not self._is_on:
            return
        for host in request.headers.getall("Host", ()):
            if host and not self._may_ask_as(host):
                raise ForbiddenError(
                    f"Host: this server listens on {self._host} and has no name {name_of(host)[:_NAME_CHARACTERS_MAX]!r}, as a page"
                    f" of another site would call it (DNS rebinding); ask for localhost or an IP address, or add the name to {self._setting}"
                )
        origin = request.headers.get("Origin")
        if origin is None or request.method == "OPTIONS" or self._is_own_page(origin, request.host):
            return  # a page that asks by OPTIONS whether it may is not told so
        if not (for_pages and (_ANY in self._origins or origin in self._origins)):
            raise ForbiddenError(
                f"Origin: a page of {origin[:_NAME_CHARACTERS_MAX]!r} may not use this server, which listens on {self._host}; name"
                f" pages that may use the API in {self._pages}"
            )

    def _is_own(self, name: str) -> bool:
        is_named = name in self._hosts or _ANY in self._hosts
        return is_named or is_unnamed(name) or name.endswith(".localhost")

    def _is_own_page(self, origin: str, host: str) -> bool:
        """Tell whether the page is this server's, another one's of this host, or no web page: sites cannot claim other schemes."""
        scheme, mark, place = origin.partition("://")
        if not mark:  # "null": a file, or a frame that any site may make
            return False
        name = name_of(place)
        return (
            scheme not in {"http", "https"}
            or place == host
            or name == "localhost"
            or name.endswith(".localhost")
            or name in self._hosts
            or _is_loopback(name)
        )


def is_unnamed(name: str) -> bool:
    """Tell whether a host is `localhost` or an IP address: no name that somebody could have resolve to this machine."""
    try:
        return name == "localhost" or bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def _is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def name_of(host: str) -> str:
    """Give the name of `NAME`, `NAME:PORT` or `[ADDRESS]:PORT`, in lower case; all of it where it is none of them."""
    try:
        return (urlsplit(f"//{host}").hostname or host).rstrip(".")
    except ValueError:
        return host
