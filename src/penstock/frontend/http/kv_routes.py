"""Routes by which an operator lists, pins, prefetches, evicts and flushes the KV caches of workers."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import msgspec
from aiohttp import web

from penstock.core.errors import RequestError
from penstock.core.types.events import Tier
from penstock.core.types.kv import KvAction, KvEvict, KvFlush, KvList, KvPin, KvUnpin
from penstock.frontend.frontend import Frontend
from penstock.frontend.openai.answers import encode
from penstock.frontend.requests.kv_body import (
    FlushBody,
    PinBody,
    Prefix,
    PromptBody,
    UnpinBody,
    check_name,
    prefix_of,
)

_Wish = TypeVar("_Wish", bound=msgspec.Struct)
ReadBody = Callable[[web.Request, type[msgspec.Struct]], Awaitable[msgspec.Struct]]


class KvRoutes:
    """Handlers of `/admin/kv`."""

    def __init__(self, frontend: Frontend, read_body: ReadBody) -> None:
        """Use a frontend's models and dispatcher; `read_body` reads and checks the body of an admin's request."""
        self._frontend = frontend
        self._read_body = read_body

    def routes(self) -> Sequence[web.RouteDef]:
        """Give the routes."""
        return [
            web.get("/admin/kv", self._list),
            web.post("/admin/kv/pin", self._pin),
            web.post("/admin/kv/unpin", self._unpin),
            web.post("/admin/kv/prefetch", self._prefetch),
            web.post("/admin/kv/evict", self._evict),
            web.post("/admin/kv/flush", self._flush),
        ]

    async def _list(self, request: web.Request) -> web.Response:
        return await self._act(KvList(), request.query.get("worker"))

    async def _pin(self, request: web.Request) -> web.Response:
        body = await self._read(request, PinBody)
        check_name(body.name)
        if body.ttl_s is not None and not body.ttl_s > 0:
            raise RequestError(f"ttl_s: must be > 0 seconds, got {body.ttl_s:g}", param="ttl_s")
        prefix = await self._prefix(body)
        pin = KvPin(name=body.name, block_hashes=prefix.request.block_hashes, ttl_s=body.ttl_s)
        if body.worker is None:  # at least one worker has it then
            dispatcher = self._frontend.dispatcher
            await dispatcher.act_on_kv(msgspec.structs.replace(pin, is_check=True), None)
            await prefix.prefetch(dispatcher)
        return await self._act(pin, body.worker)

    async def _unpin(self, request: web.Request) -> web.Response:
        body = await self._read(request, UnpinBody)
        action = KvUnpin(name=body.name, is_session=body.session, tenant=body.tenant)
        return await self._act(action, body.worker)

    async def _prefetch(self, request: web.Request) -> web.Response:
        body = await self._read(request, PromptBody)
        if body.worker is not None:
            raise RequestError("worker: the router chooses it; leave it out", param="worker")
        prefix = await self._prefix(body)
        return _json(encode(await prefix.prefetch(self._frontend.dispatcher)))

    async def _evict(self, request: web.Request) -> web.Response:
        body = await self._read(request, PromptBody)
        prefix = await self._prefix(body)
        return await self._act(KvEvict(block_hashes=prefix.request.block_hashes), body.worker)

    async def _flush(self, request: web.Request) -> web.Response:
        body = await self._read(request, FlushBody)
        if body.tier is not None and body.tier not in list(Tier):
            raise RequestError(
                f"tier: must be device, or left out for all tiers, got {body.tier[:40]!r}", param="tier"
            )
        return await self._act(KvFlush(tier=None if body.tier is None else Tier(body.tier)), body.worker)

    async def _act(self, action: KvAction, worker: str | None) -> web.Response:
        acted = await self._frontend.dispatcher.act_on_kv(action, worker)
        return _json(encode({"workers": acted}))

    async def _prefix(self, body: PromptBody) -> Prefix:
        frontend = self._frontend
        model = await frontend.served_model(body.model)
        return prefix_of(body, model, f"kv-{frontend.new_id()}", hash_key=frontend.hash_key)

    async def _read(self, request: web.Request, kind: type[_Wish]) -> _Wish:
        body = await self._read_body(request, kind)
        assert isinstance(body, kind), "decoded as such"
        return body


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")
