"""Routes under `/admin`: workers and their roles, routing decisions, and the KV caches of workers."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec
from aiohttp import web

from penstock.core.errors import RequestError
from penstock.core.ids import RequestId
from penstock.core.json_text import encode_json
from penstock.core.types.events import Tier
from penstock.core.types.instances import Role, request_salt
from penstock.core.types.kv import KvAction, KvEvict, KvFlush, KvList, KvPin, KvUnpin
from penstock.core.types.requests import Request, SamplingParams
from penstock.core.wire import num_tokens
from penstock.frontend.apis.bodies import ChatRequest, CompletionRequest, Message
from penstock.frontend.apis.chat import RoutingDecisions
from penstock.frontend.apis.checks import CACHE_SALT_CHARACTERS_MAX, check_chat, check_completion
from penstock.frontend.apis.decoding import decode_body
from penstock.frontend.encoding import encode_prompts
from penstock.frontend.frontend import Frontend
from penstock.frontend.http.replies import json_response
from penstock.frontend.text.models import ServedModel
from penstock.seams import RequestDispatcher

LATEST_DEFAULT = 16
LATEST_MAX = 64


class DecisionSource(Protocol):
    """Gives routing decisions; see `seams.RequestDispatcher`."""

    def explain(self, request_id: str) -> Sequence[object]: ...

    def latest_decisions(self, most: int) -> Sequence[object]: ...


class ProcessDecisions(RoutingDecisions):
    """Decisions of one process. Several processes may share a port, and each knows only its own decisions."""

    pid: int


def explain_one(source: DecisionSource, request: web.Request) -> ProcessDecisions:
    """Give the decisions about the request id in the path.

    Raises:
        RequestError: the id is unknown (404), or the query has a parameter.
    """
    _check_keys(request, [])
    request_id = request.match_info["id"]
    decisions = source.explain(request_id)
    if not decisions:
        raise RequestError(
            f"no decision about {request_id!r} is known here: it is too old, or another frontend process decided it;"
            " give an answer's id, soon, or raise router.explain.decisions_max",
            http_status=404,
            field="id",
        )
    return ProcessDecisions(decisions, os.getpid())


def explain_latest(source: DecisionSource, request: web.Request) -> ProcessDecisions:
    """Give the latest decisions, `?last=` of them.

    Raises:
        RequestError: `last` is no number or too large, or the query has another parameter.
    """
    _check_keys(request, ["last"])
    given = request.query.get("last", str(LATEST_DEFAULT))
    if not (given.isascii() and given.isdigit() and 1 <= int(given[:9]) <= LATEST_MAX):
        raise RequestError(f"must be 1 to {LATEST_MAX}, got {given[:40]!r}", field="last")
    return ProcessDecisions(source.latest_decisions(int(given)), os.getpid())


def _check_keys(request: web.Request, known: Sequence[str]) -> None:
    """Raise RequestError for an unknown query parameter."""
    for key in request.query:
        if key not in known:
            expected = f"{', '.join(known)} only" if known else "nothing"
            raise RequestError(
                f"{key[:40]!r} after the '?' of {request.path} is not known; expected {expected}",
                param=key[:40],
            )


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
    """Ends a pin."""

    name: str
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
class PromptPrefix:
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
        raise RequestError(f"must have 1 to {NAME_CHARACTERS_MAX} characters, got {len(name)}", field="name")


def prefix_of(body: PromptBody, model: ServedModel, request_id: str, *, hash_key: bytes) -> PromptPrefix:
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
            f"must have 1 to {CACHE_SALT_CHARACTERS_MAX} characters, got {len(body.cache_salt)}",
            field="cache_salt",
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
            "prompts to pin, prefetch or evict may hold text only; leave it out",
            field=encoded.media[0].param,
        )
    count = num_tokens(encoded.token_ids)
    if not card.block_size <= count < card.context_length:
        raise RequestError(
            f"must have {card.block_size} tokens, a block, to {card.context_length - 1}, the context, got {count}",
            field=encoded.param,
        )
    return PromptPrefix(
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


_Wish = TypeVar("_Wish", bound=msgspec.Struct)


class AdminRoutes:
    """Handlers of `/admin` for one `Frontend`."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    def routes(self) -> Sequence[web.RouteDef]:
        return [
            web.get("/admin/workers", self._workers),
            web.post("/admin/workers/{name}/role", self._change_role),
            web.post("/admin/workers/{name}/sleep", self._sleep),
            web.post("/admin/workers/{name}/wake", self._wake_up),
            web.get("/admin/explain", self._explain_latest),
            web.get("/admin/explain/{id}", self._explain_one),
            web.get("/admin/kv", self._list),
            web.post("/admin/kv/pin", self._pin),
            web.post("/admin/kv/unpin", self._unpin),
            web.post("/admin/kv/prefetch", self._prefetch),
            web.post("/admin/kv/evict", self._evict),
            web.post("/admin/kv/flush", self._flush),
        ]

    async def _explain_latest(self, request: web.Request) -> web.Response:
        return json_response(encode_json(explain_latest(self._frontend.dispatcher, request)))

    async def _explain_one(self, request: web.Request) -> web.Response:
        return json_response(encode_json(explain_one(self._frontend.dispatcher, request)))

    async def _workers(self, _: web.Request) -> web.Response:
        return json_response(
            encode_json({"pid": os.getpid(), "workers": self._frontend.dispatcher.workers()})
        )

    async def _change_role(self, request: web.Request) -> web.Response:
        wish = await self._read(request, _RoleBody)
        dispatcher = self._frontend.dispatcher
        return json_response(encode_json(await dispatcher.change_role(request.match_info["name"], wish.role)))

    async def _sleep(self, request: web.Request) -> web.Response:
        wish = await self._read(request, _SleepBody)
        dispatcher = self._frontend.dispatcher
        return json_response(encode_json(await dispatcher.sleep(request.match_info["name"], wish.level)))

    async def _wake_up(self, request: web.Request) -> web.Response:
        await self._read(request, _WakeBody)
        return json_response(encode_json(await self._frontend.dispatcher.wake_up(request.match_info["name"])))

    async def _list(self, request: web.Request) -> web.Response:
        return await self._act(KvList(), request.query.get("worker"))

    async def _pin(self, request: web.Request) -> web.Response:
        body = await self._read(request, PinBody)
        check_name(body.name)
        if body.ttl_s is not None and not body.ttl_s > 0:
            raise RequestError(f"must be > 0 seconds, got {body.ttl_s:g}", field="ttl_s")
        prefix = await self._prefix(body)
        pin = KvPin(name=body.name, block_hashes=prefix.request.block_hashes, ttl_s=body.ttl_s)
        if body.worker is None:  # at least one worker has it then
            dispatcher = self._frontend.dispatcher
            await dispatcher.act_on_kv(msgspec.structs.replace(pin, is_check=True), None)
            await prefix.prefetch(dispatcher)
        return await self._act(pin, body.worker)

    async def _unpin(self, request: web.Request) -> web.Response:
        body = await self._read(request, UnpinBody)
        return await self._act(KvUnpin(name=body.name), body.worker)

    async def _prefetch(self, request: web.Request) -> web.Response:
        body = await self._read(request, PromptBody)
        if body.worker is not None:
            raise RequestError("the router chooses it; leave it out", field="worker")
        prefix = await self._prefix(body)
        return json_response(encode_json(await prefix.prefetch(self._frontend.dispatcher)))

    async def _evict(self, request: web.Request) -> web.Response:
        body = await self._read(request, PromptBody)
        prefix = await self._prefix(body)
        return await self._act(KvEvict(block_hashes=prefix.request.block_hashes), body.worker)

    async def _flush(self, request: web.Request) -> web.Response:
        body = await self._read(request, FlushBody)
        if body.tier is not None and body.tier not in list(Tier):
            raise RequestError(
                f"must be device, or left out for all tiers, got {body.tier[:40]!r}", field="tier"
            )
        return await self._act(KvFlush(tier=None if body.tier is None else Tier(body.tier)), body.worker)

    async def _act(self, action: KvAction, worker: str | None) -> web.Response:
        acted = await self._frontend.dispatcher.act_on_kv(action, worker)
        return json_response(encode_json({"workers": acted}))

    async def _prefix(self, body: PromptBody) -> PromptPrefix:
        frontend = self._frontend
        model = await frontend.served_model(body.model)
        return prefix_of(body, model, f"kv-{frontend.new_id()}", hash_key=frontend.hash_key)

    async def _read(self, request: web.Request, kind: type[_Wish]) -> _Wish:
        """Read the body of an admin's request; an empty one has all defaults."""
        if (
            request.content_type != "application/json"
        ):  # so that browsers ask (CORS preflight) before another site's page may send it
            raise RequestError(
                f"Content-Type: must be application/json, got {request.content_type}", http_status=415
            )
        frontend = self._frontend
        with frontend.arrive() as slot, frontend.budget.hold(slot.end) as received, slot.limit():
            body = b"".join(await frontend.bodies.read(request, received))
        return decode_body(body or b"{}", kind)


class _RoleBody(msgspec.Struct, forbid_unknown_fields=True):
    role: Role


class _SleepBody(msgspec.Struct, forbid_unknown_fields=True):
    level: int = 1


class _WakeBody(msgspec.Struct, forbid_unknown_fields=True):
    pass
