"""Prompts with media: fetched, digested, expanded by an engine, hashed. Routers then see the tokens that are computed."""

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
import aiohttp.abc
import aiohttp.resolver
import msgspec
from aiohttp import hdrs
from yarl import URL

from penstock.core.errors import Overloaded, PenstockError, RequestError
from penstock.core.hashing import block_hashes
from penstock.core.types.instances import request_salt
from penstock.core.types.requests import MediaItem, MediaPrompt
from penstock.core.wire import pack_hashes, unpack_tokens
from penstock.frontend.apis.bodies import GenerationRequest, MediaPart
from penstock.frontend.config import MediaConfig, MediaFetchConfig
from penstock.frontend.encoding import EncodedPrompt
from penstock.frontend.errors import BodySizeError
from penstock.frontend.limits.admission import RequestSlot
from penstock.frontend.text.models import ServedModel
from penstock.seams import RequestDispatcher

_PIECE_BYTES = 64 << 10
_CONNECTIONS_MAX = 16
"""Files that are fetched at once; others wait."""


class MediaFetcher:
    """Fetches by http and https. One event loop owns it."""

    def __init__(self, config: MediaFetchConfig) -> None:
        self._config = config
        self._places = config.places
        self._free = asyncio.Semaphore(_CONNECTIONS_MAX)
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
            raise RequestError(f"not a URL: {error}", field=f"{part.param}.url", param=part.param) from error
        if (host, port) not in self._places:
            where = host if url.is_default_port() else f"{host}:{port}"
            raise RequestError(
                f"this server does not fetch from {where!r}; send the file as a data URL"
                f" (data:image/png;base64,...), or have the operator add {where!r} to frontend.media.fetch.hosts",
                field=f"{part.param}.url",
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
            connector = aiohttp.TCPConnector(resolver=resolver, use_dns_cache=False, limit=_CONNECTIONS_MAX)
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
                        f"the file is larger than {most} bytes (frontend.media.fetch.bytes_max); send a smaller"
                        " one",
                        field=f"{part.param}.url",
                        param=part.param,
                        http_status=413,
                    )
        if not data:
            raise _failed(part, f"{url.host} sent no bytes")
        return bytes(data)


class _PublicResolver(aiohttp.abc.AbstractResolver):
    """Resolves names and checks the addresses. The connector connects to the checked addresses, so a name cannot change in between."""

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
        f"could not be fetched: {why}; send the file as a data URL",
        field=f"{part.param}.url",
        param=part.param,
    )


_RETRY_AFTER_S = 1.0
_THREAD_BYTES = 1 << 20
"""More bytes are digested in a thread: this many take about a millisecond."""


class PromptMedia:
    """Completes prompts that have media, within bounds. One event loop owns it."""

    def __init__(
        self,
        config: MediaConfig,
        dispatcher: RequestDispatcher,
        *,
        hash_key: bytes,
        count: Callable[[int], None],
    ) -> None:
        """Make it; `count` is told by how many bytes `held_bytes` changes."""
        self._config = config
        self._count = count
        self._dispatcher = dispatcher
        self._hash_key = hash_key
        self._fetcher = MediaFetcher(config.fetch)
        self.held_bytes = 0
        """Bytes of media of all requests in flight."""

    async def complete(
        self,
        prompts: Sequence[EncodedPrompt],
        request: GenerationRequest,
        model: ServedModel,
        slot: RequestSlot,
    ) -> tuple[EncodedPrompt, ...]:
        """Expand the prompts that have media; give all.

        Args:
            prompts: of the request, encoded.
            request: without its prompts.
            model: that it names.
            slot: holds the request's media until `release`.

        Raises:
            RequestError: too many items or bytes, one cannot be fetched, or the engine refuses them.
            Overloaded: requests in flight hold as many bytes of media as may be.
            Unavailable: no worker can expand them now.
        """
        return tuple(
            [
                await self._complete(prompt, request, model, slot) if prompt.media else prompt
                for prompt in prompts
            ]
        )

    def release(self, slot: RequestSlot) -> None:
        """Give back what a request holds, as it ends. Safe twice."""
        self._hold(-slot.media_bytes, slot)

    async def close(self) -> None:
        """Close connections to other servers. Safe twice."""
        await self._fetcher.close()

    async def _complete(
        self, prompt: EncodedPrompt, request: GenerationRequest, model: ServedModel, slot: RequestSlot
    ) -> EncodedPrompt:
        self._check_counts(prompt.media, model)
        parts = [await self._fetched(part, slot) for part in prompt.media]
        size, choices = sum(len(part.data) for part in parts), request.n or 1
        if size * choices > self._config.request_bytes_max:
            raise BodySizeError(
                f"{size} bytes of media for {choices} choices, at most {self._config.request_bytes_max}"
                " bytes in all are allowed (frontend.media.request_bytes_max); send smaller files",
                field=prompt.param,
            )
        if size > _THREAD_BYTES:
            items = await asyncio.to_thread(_items, parts)
        else:
            items = _items(parts)
        media = MediaPrompt(token_ids=prompt.token_ids, items=items)
        expanded = await self._dispatcher.expand_media(model.card, media)
        if len(expanded.positions) != len(items):
            raise RequestError(
                f"{prompt.param}: the engine placed {len(expanded.positions)} of {len(items)} media"
            )
        items = tuple(
            msgspec.structs.replace(item, position=position)
            for item, position in zip(items, expanded.positions, strict=True)
        )
        media = msgspec.structs.replace(media, items=items)
        card, token_ids = model.card, unpack_tokens(expanded.token_ids)
        packed = prompt.block_hashes
        if len(token_ids) < card.context_length:
            salt = request_salt(card.salt, request.cache_salt)
            packed = pack_hashes(
                block_hashes(token_ids, card.block_size, salt, media.extra(), key=self._hash_key)
            )
        return EncodedPrompt(
            token_ids=expanded.token_ids,
            block_hashes=packed,
            param=prompt.param,
            expanded=media,
            in_reasoning=prompt.in_reasoning,
        )

    def _check_counts(self, parts: Sequence[MediaPart], model: ServedModel) -> None:
        most = self._config.items_max
        if len(parts) > most:
            raise RequestError(
                f"{len(parts)} images and other media, at most {most} are allowed (frontend.media.items_max); send"
                " fewer",
                field="messages",
            )
        for kind in model.card.media:
            count = sum(part.modality == kind.modality for part in parts)
            if count > kind.items_max:
                raise RequestError(
                    f"{count} parts with {kind.modality}, model {model.card.name!r} takes at most {kind.items_max};"
                    " send fewer",
                    field="messages",
                )

    async def _fetched(self, part: MediaPart, slot: RequestSlot) -> MediaPart:
        """Fetch a part that is a URL; count the bytes of any."""
        if part.url is not None:
            part = msgspec.structs.replace(part, data=await self._fetcher.fetch(part))
        size = len(part.data)
        if self.held_bytes + size > self._config.bytes_max:
            raise Overloaded(
                f"{self.held_bytes} bytes of media belong to requests in flight, and {size} more would exceed"
                f" {self._config.bytes_max} (frontend.media.bytes_max); try again in a moment",
                retry_after_s=_RETRY_AFTER_S,
            )
        self._hold(size, slot)
        return part

    def _hold(self, change_bytes: int, slot: RequestSlot) -> None:
        if change_bytes:
            self.held_bytes += change_bytes
            slot.media_bytes += change_bytes
            self._count(change_bytes)


def _items(parts: Sequence[MediaPart]) -> tuple[MediaItem, ...]:
    return tuple(MediaItem.of(part.modality, part.data) for part in parts)
