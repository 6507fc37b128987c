"""Fetches media from the hosts that the operator allows, and from nowhere else: a client must not reach what only the frontend can."""

import asyncio
import ipaddress
import socket
from typing import Any

import aiohttp
import aiohttp.abc
import aiohttp.resolver
from aiohttp import hdrs
from yarl import URL

from penstock.core.errors import PenstockError, RequestError
from penstock.frontend.config import MediaFetchConfig
from penstock.frontend.openai.media import MediaPart

_PIECE_BYTES = 64 << 10


class MediaFetcher:
    """Fetches by http and https. One event loop owns it."""

    def __init__(self, config: MediaFetchConfig) -> None:
        self._config = config
        self._places = config.places
        self._free = asyncio.Semaphore(config.connections_max)
        self._session: aiohttp.ClientSession | None = None

    async def fetch(self, part: MediaPart) -> bytes:
        """Fetch the bytes behind a part's URL.

        Raises:
            RequestError: its host is not allowed, has a private address, redirects, answers an error, takes too long or sends too much.
        """
        try:
            url = URL(part.url or "")
            host, port = (url.host or "").lower(), url.port
        except ValueError as error:
            raise RequestError(f"{part.param}.url: not a URL: {error}", param=part.param) from error
        if (host, port) not in self._places:
            where = host if url.is_default_port() else f"{host}:{port}"
            raise RequestError(
                f"{part.param}.url: this server does not fetch from {where!r}; send the file as a data URL"
                f" (data:image/png;base64,...), or have the operator add {where!r} to frontend.media.fetch.hosts",
                param=part.param,
            )
        try:
            async with asyncio.timeout(self._config.timeout_s), self._free:
                return await self._get(url, part)
        except TimeoutError as error:
            raise _failed(
                part, f"{host} took longer than {self._config.timeout_s:g} s (frontend.media.fetch.timeout_s)"
            ) from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise _failed(
                part, f"{host}:{port}: {' '.join(str(error).split()) or type(error).__name__}"
            ) from error

    async def close(self) -> None:
        """Close its connections. Safe twice."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _get(self, url: URL, part: MediaPart) -> bytes:
        _check_literal(url.host or "", allows_private=self._config.private_addresses)
        if self._session is None:
            resolver = _PublicResolver(allows_private=self._config.private_addresses)
            connector = aiohttp.TCPConnector(
                resolver=resolver, use_dns_cache=False, limit=self._config.connections_max
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
                auto_decompress=False,  # a few compressed bytes may stand for any number
                headers={hdrs.ACCEPT_ENCODING: "identity"},
            )
        async with self._session.get(url, allow_redirects=False) as answer:
            if answer.status != 200:
                where = "; redirects are not followed" if 300 <= answer.status < 400 else ""
                raise _failed(part, f"{url.host} answered {answer.status}{where}")
            encoding = answer.headers.get(hdrs.CONTENT_ENCODING, "identity")
            if encoding.lower() != "identity":
                raise _failed(part, f"{url.host} sent it compressed ({encoding[:20]!r}), though asked not to")
            most, data = self._config.bytes_max, bytearray()
            async for piece in answer.content.iter_chunked(_PIECE_BYTES):
                data += piece
                if len(data) > most:
                    raise RequestError(
                        f"{part.param}.url: the file is larger than {most} bytes (frontend.media.fetch.bytes_max); send a smaller"
                        " one",
                        param=part.param,
                        http_status=413,
                    )
        if not data:
            raise _failed(part, f"{url.host} sent no bytes")
        return bytes(data)


class _PublicResolver(aiohttp.abc.AbstractResolver):
    """Resolves names; the addresses that it gives are those that are connected to, so a name cannot change in between."""

    def __init__(self, *, allows_private: bool) -> None:
        self._allows_private = allows_private
        self._resolver = aiohttp.resolver.ThreadedResolver()

    async def resolve(self, host: str, port: int = 0, family: Any = socket.AF_INET) -> list[Any]:
        found = await self._resolver.resolve(host, port, family)
        if not self._allows_private:
            for entry in found:
                _check_address(entry["host"], host)
        return list(found)

    async def close(self) -> None:
        await self._resolver.close()


def _check_literal(host: str, *, allows_private: bool) -> None:
    """Check a host that is an address itself, which is not resolved."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return
    if not allows_private:
        _check_address(host, host)


def _check_address(address: str, host: str) -> None:
    parsed = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(parsed, "ipv4_mapped", None) or parsed
    if not mapped.is_global or mapped.is_multicast:
        raise ValueError(f"{host} is {address}, no public address (frontend.media.fetch.private_addresses)")


def _failed(part: MediaPart, why: str) -> PenstockError:
    return RequestError(
        f"{part.param}.url: could not be fetched: {why}; send the file as a data URL", param=part.param
    )
