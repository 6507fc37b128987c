"""Prompts with media: fetched, digested, expanded by an engine, hashed. Routers then see the tokens that are computed."""

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from penstock.core.errors import Overloaded, RequestError
from penstock.core.hashing import block_hashes
from penstock.core.types.instances import request_salt
from penstock.core.types.requests import MediaItem, MediaPrompt
from penstock.core.wire import pack_hashes, unpack_tokens
from penstock.frontend.config import MediaConfig
from penstock.frontend.errors import BodySizeError
from penstock.frontend.limits.admission import Slot
from penstock.frontend.openai.bodies import GenerationRequest
from penstock.frontend.openai.media import MediaPart
from penstock.frontend.requests.encoding import Prompt
from penstock.frontend.requests.fetch import MediaFetcher
from penstock.frontend.text.models import ServedModel
from penstock.seams import RequestDispatcher

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
        self, prompts: Sequence[Prompt], request: GenerationRequest, model: ServedModel, slot: Slot
    ) -> tuple[Prompt, ...]:
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

    def release(self, slot: Slot) -> None:
        """Give back what a request holds, as it ends. Safe twice."""
        self._hold(-slot.media_bytes, slot)

    async def close(self) -> None:
        """Close connections to other servers. Safe twice."""
        await self._fetcher.close()

    async def _complete(
        self, prompt: Prompt, request: GenerationRequest, model: ServedModel, slot: Slot
    ) -> Prompt:
        self._check_counts(prompt.media, model)
        parts = [await self._fetched(part, slot) for part in prompt.media]
        size, choices = sum(len(part.data) for part in parts), request.n or 1
        if size * choices > self._config.request_bytes_max:
            raise BodySizeError(
                f"{prompt.param}: {size} bytes of media for {choices} choices, at most {self._config.request_bytes_max}"
                " bytes in all are allowed (frontend.media.request_bytes_max); send smaller files",
                param=prompt.param,
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
        return Prompt(
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
                f"messages: {len(parts)} images and other media, at most {most} are allowed (frontend.media.items_max); send"
                " fewer",
                param="messages",
            )
        for kind in model.card.media:
            count = sum(part.modality == kind.modality for part in parts)
            if count > kind.items_max:
                raise RequestError(
                    f"messages: {count} parts with {kind.modality}, model {model.card.name!r} takes at most {kind.items_max};"
                    " send fewer",
                    param="messages",
                )

    async def _fetched(self, part: MediaPart, slot: Slot) -> MediaPart:
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

    def _hold(self, change_bytes: int, slot: Slot) -> None:
        if change_bytes:
            self.held_bytes += change_bytes
            slot.media_bytes += change_bytes
            self._count(change_bytes)


def _items(parts: Sequence[MediaPart]) -> tuple[MediaItem, ...]:
    return tuple(MediaItem.of(part.modality, part.data) for part in parts)
