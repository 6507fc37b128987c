"""Bodies of an operator's actions on KV caches, and the prompts in them."""

from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.core.errors import RequestError
from penstock.core.ids import RequestId
from penstock.core.types.instances import request_salt
from penstock.core.types.requests import Request, SamplingParams
from penstock.core.wire import num_tokens
from penstock.frontend.openai.bodies import ChatRequest, CompletionRequest, Message
from penstock.frontend.openai.validation import CACHE_SALT_CHARACTERS_MAX, check_chat, check_completion
from penstock.frontend.requests.encoding import encode_prompts
from penstock.frontend.text.models import ServedModel
from penstock.seams import RequestDispatcher

_PREFETCH_PRIORITY = -1
NAME_CHARACTERS_MAX = 256


class PromptBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A prefix: `messages`, as of a chat, or `prompt`, a text or token ids. Without `model` the only model is meant."""

    model: str | None = None
    prompt: str | list[int] | None = None
    messages: list[Message] | None = None
    cache_salt: str | None = None
    worker: str | None = None


class PinBody(PromptBody, kw_only=True):
    """Keeps a prefix under a name."""

    name: str
    ttl_s: float | None = None


class UnpinBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Ends a pin or, with `session`, an agent's session."""

    name: str
    session: bool = False
    tenant: str = ""
    worker: str | None = None


class FlushBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Clears the cache on all tiers, or on the device alone."""

    tier: str | None = None
    worker: str | None = None


class Prefetched(msgspec.Struct, frozen=True, kw_only=True):
    """A prefix that a worker has now; it had `cached_tokens` of its `prompt_tokens` before."""

    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prompt as an engine request that computes it and samples one token."""

    request: Request

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt."""
        return num_tokens(self.request.token_ids)

    async def prefetch(self, dispatcher: RequestDispatcher) -> Prefetched:
        """Have the worker that routers choose compute or load the prompt; an error as of any request."""
        cached = 0
        async with dispatcher.open(self.request) as stream:
            async for delta in stream:
                cached = delta.cached_tokens if delta.cached_tokens is not None else cached
        return Prefetched(prompt_tokens=self.num_tokens, cached_tokens=cached)


def check_name(name: str) -> None:
    """Raises: RequestError: the name of a pin is empty or too long."""
    if not 1 <= len(name) <= NAME_CHARACTERS_MAX:
        raise RequestError(
            f"name: must have 1 to {NAME_CHARACTERS_MAX} characters, got {len(name)}", param="name"
        )


def prefix_of(body: PromptBody, model: ServedModel, request_id: str, *, hash_key: bytes) -> Prefix:
    """Encode a body's prompt.

    Raises:
        RequestError: both or none of `prompt` and `messages` are given, one is invalid, or it does not fill a block.
    """
    if (body.prompt is None) == (body.messages is None):
        raise RequestError(
            f"give one of prompt and messages, got {'both' if body.prompt is not None else 'none'}"
        )
    if body.cache_salt is not None and not 1 <= len(body.cache_salt) <= CACHE_SALT_CHARACTERS_MAX:
        raise RequestError(
            f"cache_salt: must have 1 to {CACHE_SALT_CHARACTERS_MAX} characters, got {len(body.cache_salt)}",
            param="cache_salt",
        )
    card = model.card
    request: ChatRequest | CompletionRequest
    if body.messages is not None:
        request = ChatRequest(model=card.name, messages=body.messages, cache_salt=body.cache_salt)
        check_chat(request, 1)
    else:
        prompt: Any = body.prompt
        request = CompletionRequest(model=card.name, prompt=prompt, cache_salt=body.cache_salt)
        check_completion(request, 1)
    (encoded,) = encode_prompts(request, model, hash_key)
    if encoded.media:
        raise RequestError(
            f"{encoded.media[0].param}: prompts to pin, prefetch or evict may hold text only; leave it out",
            param=encoded.media[0].param,
        )
    count = num_tokens(encoded.token_ids)
    if not card.block_size <= count < card.context_length:
        raise RequestError(
            f"{encoded.param}: must have {card.block_size} tokens, a block, to {card.context_length - 1}, the context, got {count}",
            param=encoded.param,
        )
    return Prefix(
        Request(
            request_id=RequestId(request_id),
            model=card.parent or card.name,
            adapter=None if card.parent is None else card.name,
            token_ids=encoded.token_ids,
            block_hashes=encoded.block_hashes,
            salt=request_salt(card.salt, body.cache_salt),
            sampling=SamplingParams(max_tokens=1, temperature=0.0),
            priority=_PREFETCH_PRIORITY,
        )
    )
