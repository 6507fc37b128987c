"""The API server: Kubernetes' REST protocol over the store.

Kept: list in pages, watch with resourceVersion, bookmarks and 410, optimistic locking (409), server-side apply with field managers,
merge patch, the subresources `status` and `scale`, label selectors, finalizers, garbage collection by ownerReferences,
schemas of CustomResourceDefinitions, evictions that keep PodDisruptionBudgets, tokens with the rules of their roles, and TLS. Not kept: strategic merge patch, dry runs, discovery, orphans, and
schemas and admission of built-in kinds.
"""

import asyncio
import contextlib
import copy
import json
import secrets
import ssl
from collections.abc import AsyncGenerator
from typing import Any, Self

from aiohttp import web

from tests.support.kubernetes import fields
from tests.support.kubernetes.access import Access, Rules
from tests.support.kubernetes.eviction import PODS, evict
from tests.support.kubernetes.faults import Faults
from tests.support.kubernetes.fields import Manager
from tests.support.kubernetes.problems import Refused
from tests.support.kubernetes.requests import failed, manager_of, merge, object_of, token_in, verb_of
from tests.support.kubernetes.resources import Kind, Object
from tests.support.kubernetes.scale import edited_scale, scale_of
from tests.support.kubernetes.selectors import Selector
from tests.support.kubernetes.store import Name, Store

_MERGE, _APPLY = "application/merge-patch+json", "application/apply-patch+yaml"


class ApiServer:
    """An API server on a port, of this host by default; it keeps its objects while it is stopped. One event loop owns it."""

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        tokens: tuple[str, ...] = ("suite-token",),
        tls: ssl.SSLContext | None = None,
        faults: Faults | None = None,
    ) -> None:
        self.store = Store()
        self.tokens = set(tokens)
        self.faults = faults or Faults()
        self.forbidden: set[tuple[str, str]] = set()
        """Verbs and plurals that are refused, such as `("list", "leases")`, each time in other words."""
        self.refusal = (403, "Forbidden")
        self.access = Access(self.store)
        """Of whom a token is; one of nobody may do everything."""
        self.bookmark_s = 60.0
        self.host = host
        self.port = port
        self.requests: list[tuple[str, str]] = []
        """Verb and path of each request."""
        self._tls = tls
        self._listeners: tuple[Any, ...] = ()
        self._runner: web.AppRunner | None = None
        self._pages: dict[str, tuple[int, list[Object]]] = {}
        self._handlers: set[asyncio.Task[Any]] = set()
        self._is_paused = False
        self._resumed = asyncio.Event()

    @property
    def rules(self) -> dict[str, Rules]:
        """Rules of tokens that are of no service account."""
        return self.access.rules

    def token_of(self, namespace: str, account: str) -> str:
        """Make a token of a service account."""
        token = self.access.token_of(namespace, account)
        self.tokens.add(token)
        return token

    @property
    def open_requests(self) -> int:
        """Requests that are being answered, watches among them."""
        return len(self._handlers)

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://{self.host}:{self.port}"

    async def start(self) -> None:
        """Listen, at the port of the last time."""
        app = web.Application(client_max_size=8 << 20)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(
            app, shutdown_timeout=0, handle_signals=False, access_log=None, handler_cancellation=True
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.host, self.port, ssl_context=self._tls, reuse_address=True)
        await site.start()
        assert isinstance(site._server, asyncio.Server)
        self._listeners = site._server.sockets
        if not self.port:
            self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Be dead: all connections end, none is accepted. Safe twice."""
        runner, self._runner = self._runner, None
        if runner is not None:
            for listener in self._listeners:  # asyncio loses what it accepts while it closes
                asyncio.get_running_loop().remove_reader(listener.fileno())
            for _ in range(4):
                await asyncio.sleep(0)
            for connection in runner.server.connections if runner.server else ():
                if connection.transport is not None:
                    connection.transport.abort()
            for handler in tuple(self._handlers):
                handler.cancel()
            await runner.cleanup()

    def pause(self) -> None:
        """Hang: requests are accepted and not answered, watches are silent."""
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False
        self._resumed.set()
        self._resumed = asyncio.Event()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.resume()
        await self.stop()

    async def _unpaused(self) -> None:
        while self._is_paused:
            await self._resumed.wait()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        task = asyncio.current_task()
        assert task is not None
        self._handlers.add(task)
        try:
            return await self._answer(request)
        finally:
            self._handlers.discard(task)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        try:
            await self._unpaused()
            faults = self.faults if self.faults.token in {"", token_in(request)} else Faults()
            if faults.slow_s:
                await asyncio.sleep(faults.rng.uniform(0, faults.slow_s))
            self._authenticate(request)
            if faults.hits(faults.too_many):
                refused = Refused(429, "TooManyRequests", "too many requests, please try again later")
                headers = {"Retry-After": str(faults.retry_after_s)}
                return web.json_response(refused.status(), status=429, headers=headers)
            if faults.hits(faults.unavailable):
                away = Refused(
                    503, "ServiceUnavailable", "the server is currently unable to handle the request"
                )
                return web.json_response(away.status(), status=away.code)
            fails = faults.hits(faults.error)
            if fails and faults.rng.random() < 0.5:
                return failed()
            response = await self._route(request)
            if fails and not response.prepared:
                return failed()  # what was asked is done
            if not response.prepared and faults.hits(faults.drop) and request.transport is not None:
                request.transport.abort()
        except Refused as refused:
            return web.json_response(refused.status(), status=refused.code)
        return response

    def _authenticate(self, request: web.Request) -> None:
        if not any(secrets.compare_digest(token_in(request), each) for each in self.tokens):
            raise Refused(401, "Unauthorized", "Unauthorized")

    async def _route(self, request: web.Request) -> web.StreamResponse:
        parts = [part for part in request.match_info["path"].split("/") if part]
        if parts[:1] == ["api"] and len(parts) >= 2:
            group, version, rest = "", parts[1], parts[2:]
        elif parts[:1] == ["apis"] and len(parts) >= 3:
            group, version, rest = parts[1], parts[2], parts[3:]
        else:
            group, version, rest = "", "", []
        namespace = ""
        if len(rest) >= 3 and rest[0] == "namespaces":
            namespace, rest = rest[1], rest[2:]
        kind = self.store.kinds.find(group, version, rest[0]) if rest else None
        name, subresource = (*rest[1:], "", "")[:2]
        if (
            kind is None
            or len(rest) > 3
            or (namespace and not kind.is_namespaced)
            or not _has(kind, subresource)
        ):
            raise Refused(404, "NotFound", "the server could not find the requested resource")
        verb = verb_of(request, name, subresource)
        self.requests.append((verb, request.path))
        self._authorize(request, verb, kind, subresource, (namespace, name))
        if verb == "watch":
            return await self._watch(request, kind, namespace or None)
        if verb == "list":
            return web.json_response(self._list(request, kind, namespace or None))
        if verb != "get" and not namespace and kind.is_namespaced:
            raise Refused(
                405, "MethodNotAllowed", "the server does not allow this method on the requested resource"
            )
        return await self._one(request, verb, kind, (namespace, name), subresource)

    def _authorize(self, request: web.Request, verb: str, kind: Kind, subresource: str, name: Name) -> None:
        self.access.check(token_in(request), verb, kind, subresource, name)
        if (verb, kind.plural) in self.forbidden:
            text = f'{kind.plural} is forbidden: the test forbids to {verb} "{name[1]}" (request {len(self.requests)})'
            raise Refused(*self.refusal, text)

    async def _one(  # noqa: PLR0911 - one for each verb
        self, request: web.Request, verb: str, kind: Kind, name: Name, subresource: str
    ) -> web.StreamResponse:
        manager = manager_of(request, subresource)
        if verb == "get":
            stored = self.store.get(kind, name)
            return web.json_response(
                scale_of(kind, stored.body) if subresource == "scale" else stored.shown()
            )
        if verb == "delete":
            options = json.loads(await request.read() or b"{}")
            return web.json_response(self.store.delete(kind, name, options).shown())
        body = object_of(await request.read())
        if not subresource:
            self.access.check_gift(token_in(request), kind, name[0], body)
        if subresource == "eviction":
            evict(self.store, kind, name, body)
            return web.json_response({"kind": "Status", "apiVersion": "v1", "status": "Success"}, status=201)
        if verb == "create":
            stored = self.store.create(kind, name[0], body, manager)
            return web.json_response(stored.shown(), status=201)
        if verb == "update" and subresource != "scale":
            stored = self.store.change(kind, name, lambda _: body, manager, subresource=subresource)
            return web.json_response(stored.shown())
        content = request.content_type
        if subresource == "scale":
            stored = self.store.change(
                kind,
                name,
                lambda live: edited_scale(kind, live, body, is_patch=verb == "patch"),
                manager,
            )
            return web.json_response(scale_of(kind, stored.body))
        if content == _MERGE:
            stored = self.store.change(
                kind, name, lambda live: merge(live, body), manager, subresource=subresource
            )
            return web.json_response(stored.shown())
        if content == _APPLY:
            return self._apply(request, kind, name, subresource, body)
        raise Refused(
            415, "UnsupportedMediaType", f"the body of the request was in an unknown format - accepted media types include: {_MERGE}, {_APPLY}"
        )  # fmt: skip

    def _apply(
        self, request: web.Request, kind: Kind, name: Name, subresource: str, body: Object
    ) -> web.StreamResponse:
        if "fieldManager" not in request.query:
            raise Refused(
                422,
                "Invalid",
                "PatchOptions.meta.k8s.io is invalid: fieldManager: Required value: is required for apply patch",
            )
        if body.get("apiVersion") != kind.api_version or body.get("kind") != kind.name:
            raise Refused(400, "BadRequest", f"the object provided is no {kind.api_version} {kind.name}")
        if body.get("metadata", {}).get("managedFields"):
            raise Refused(400, "BadRequest", "metadata.managedFields must be nil")
        manager = Manager(request.query["fieldManager"], "Apply", subresource)
        body.setdefault("metadata", {}).setdefault("name", name[1])
        try:
            stored = self.store.get(kind, name)
        except Refused:
            if subresource:
                raise
            self._authorize(request, "create", kind, "", (name[0], ""))
            stored = self.store.create(kind, name[0], body, manager)
            return web.json_response(stored.shown(), status=201)
        owners = copy.deepcopy(stored.owners)
        wanted = copy.deepcopy(body)
        if subresource == "status":
            wanted = {"status": wanted.get("status", {}), "metadata": {}}
        elif kind.has_status:
            wanted.pop("status", None)
        live = copy.deepcopy(stored.body)
        result = fields.apply(owners, manager, live, wanted, force=request.query.get("force") == "true")
        result["metadata"].pop("resourceVersion", None)
        if "resourceVersion" in body["metadata"]:
            result["metadata"]["resourceVersion"] = body["metadata"]["resourceVersion"]
        stored = self.store.change(kind, name, lambda _: result, None, subresource=subresource, owners=owners)
        return web.json_response(stored.shown())

    def _list(self, request: web.Request, kind: Kind, namespace: str | None) -> Object:
        selector = Selector(request.query.get("labelSelector", ""))
        token = request.query.get("continue")
        if token is not None:
            if token not in self._pages or self._pages[token][0] < self.store.oldest:
                raise Refused(
                    410,
                    "Expired",
                    "The provided continue parameter is too old to display a consistent list result.",
                )
            revision, items = self._pages.pop(token)
        else:
            revision = self.store.revision
            items = [
                stored.shown() for stored in self.store.all(kind, namespace) if selector.matches(stored.body)
            ]
        metadata: Object = {"resourceVersion": str(revision)}
        limit = int(request.query.get("limit", "0")) or len(items)
        if len(items) > limit:
            metadata["continue"] = secrets.token_hex(8)
            if "labelSelector" not in request.query:  # unknown with a selector
                metadata["remainingItemCount"] = len(items) - limit
            self._pages[metadata["continue"]] = (revision, items[limit:])
        return {
            "kind": f"{kind.name}List",
            "apiVersion": kind.api_version,
            "metadata": metadata,
            "items": items[:limit],
        }

    async def _watch(self, request: web.Request, kind: Kind, namespace: str | None) -> web.StreamResponse:
        selector = Selector(request.query.get("labelSelector", ""))
        revision = int(request.query.get("resourceVersion") or self.store.revision)
        self.store.since(revision)  # refused before the answer begins
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        bookmarks = request.query.get("allowWatchBookmarks") in {"true", "1"}
        events = self._events(revision, kind, namespace, selector, bookmarks=bookmarks)
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with (
                asyncio.timeout(float(request.query.get("timeoutSeconds", "1800"))),
                contextlib.aclosing(events),
            ):
                async for event in events:
                    await self._unpaused()
                    line = json.dumps(event).encode() + b"\n"
                    if self.faults.hits(self.faults.drop_watch):
                        await response.write(line[: len(line) // 2])
                        if request.transport is not None:
                            request.transport.abort()
                        break
                    if self.faults.hits(self.faults.compact_watch):
                        self.store.compact()
                        error = {
                            "type": "ERROR",
                            "object": Refused(410, "Expired", "too old resource version").status(),
                        }
                        await response.write(json.dumps(error).encode() + b"\n")
                        break
                    await response.write(line)
        return response

    async def _events(
        self, revision: int, kind: Kind, namespace: str | None, selector: Selector, *, bookmarks: bool
    ) -> AsyncGenerator[Object]:
        loop = asyncio.get_running_loop()
        bookmark_at_s = loop.time() + self.bookmark_s
        while True:
            changed = self.store.changed
            try:
                events = self.store.since(revision)
            except Refused as refused:
                yield {"type": "ERROR", "object": refused.status()}
                return
            revision = self.store.revision
            for event in events:
                if event.kind == kind.key and namespace in {None, event.body["metadata"].get("namespace")}:
                    told = selector.told(event)
                    if told is not None:
                        yield {"type": told, "object": event.body}
            try:
                async with asyncio.timeout_at(bookmark_at_s if bookmarks else None):
                    await changed.wait()
            except TimeoutError:
                bookmark_at_s = loop.time() + self.bookmark_s
                metadata = {"resourceVersion": str(revision), "creationTimestamp": None}
                yield {
                    "type": "BOOKMARK",
                    "object": {"kind": kind.name, "apiVersion": kind.api_version, "metadata": metadata},
                }


def _has(kind: Kind, subresource: str) -> bool:
    return {
        "": True, "status": kind.has_status, "scale": kind.scale is not None, "eviction": kind.key == PODS,
    }.get(subresource, False)  # fmt: skip
