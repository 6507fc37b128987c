"""Routes of the live page: its files, its stream of snapshots, and what its buttons do."""

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources

from aiohttp import web

from penstock.core.errors import RequestError
from penstock.core.json_text import encode_json
from penstock.core.listening import Address
from penstock.frontend.errors import ForbiddenError
from penstock.frontend.frontend import Frontend
from penstock.frontend.limits.headers import is_unnamed, name_of
from penstock.frontend.watch.overview import DeploymentSupervisor
from penstock.frontend.watch.snapshot import INTERVAL_S, SnapshotFeed

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_HEADERS = {
    # Also what a defect of the page could not break: no code but its own, no other host, no frame around it.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class SiteFile:
    """A file with its type and its ETag."""

    content: bytes
    content_type: str
    etag: str

    def answer(self, request: web.Request) -> web.Response:
        """Send it, or say that the browser's copy is current."""
        headers = {**_HEADERS, "ETag": self.etag}
        if request.headers.get("If-None-Match") == self.etag:
            return web.Response(status=304, headers=headers)
        return web.Response(
            body=self.content, content_type=self.content_type, charset="utf-8", headers=headers
        )


def site_files() -> dict[str, SiteFile]:
    """Read all files, by name."""
    files = {}
    for entry in resources.files("penstock.frontend.watch").joinpath("site").iterdir():
        kind = entry.name.rpartition(".")[2]
        if kind in _TYPES:
            content = entry.read_bytes()
            etag = f'"{hashlib.blake2b(content, digest_size=12).hexdigest()}"'
            files[entry.name] = SiteFile(content, _TYPES[kind], etag)
    return files


_READER_TIMEOUT_S = 15.0
_KILL_HEADER = "X-Penstock-Page"


class WatchRoutes:
    """Handlers of one `Frontend`'s page."""

    def __init__(
        self, frontend: Frontend, supervisor: DeploymentSupervisor | None, is_draining: Callable[[], bool]
    ) -> None:
        """Make the handlers; `supervisor` tells of the whole deployment, None without a supervisor."""
        self._frontend = frontend
        self._supervisor = supervisor
        self._is_draining = is_draining
        self._feed = SnapshotFeed(frontend, supervisor)
        self._files = site_files() if frontend.config.page.enabled else {}
        self._asks_token = frontend.config.page.asks_token

    def routes(self) -> list[web.RouteDef]:
        """Give the routes; none where the page is off."""
        if not self._frontend.config.page.enabled:
            return []
        return [
            web.get("/", self._index),
            web.get("/page/{file}", self._file),
            web.get("/watch/snapshot", self._snapshot),
            web.get("/watch/events", self._events),
            web.get("/watch/requests/{id}", self._request),
            web.post("/watch/workers/{name}/kill", self._kill),
        ]

    def check(self, request: web.Request) -> None:
        """Check that somebody may watch.

        Raises:
            AdminTokenError: the admin token is needed, and was not sent.
        """
        if self._needs_token:
            self._frontend.access.check_admin(request.headers)

    @property
    def _needs_token(self) -> bool:
        if self._asks_token is not None:
            return self._asks_token
        config, access = self._frontend.config, self._frontend.access
        return access.tenants.ask_for_keys or not Address(host=config.host).is_local

    async def _index(self, request: web.Request) -> web.Response:
        return self._files["index.html"].answer(request)

    async def _file(self, request: web.Request) -> web.Response:
        file = self._files.get(request.match_info["file"])
        if file is None:
            raise RequestError(
                f"the page has no file {request.match_info['file'][:40]!r}; open /", http_status=404
            )
        return file.answer(request)

    async def _snapshot(self, _: web.Request) -> web.Response:
        body = await self._feed.snapshot()
        return web.Response(body=body, content_type="application/json", headers={"Cache-Control": "no-store"})

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """Send a snapshot each second, until the watcher leaves or the server ends."""
        self._feed.arrive()
        try:
            response = web.StreamResponse(
                headers={
                    "Content-Type": "text/event-stream; charset=utf-8",
                    "Cache-Control": "no-store",
                    "X-Accel-Buffering": "no",
                }
            )
            await response.prepare(request)
            while not self._is_draining():
                snapshot = await self._feed.snapshot()
                try:
                    # Waits for the reader past the transport's buffer, so a watcher holds that and one snapshot.
                    async with asyncio.timeout(_READER_TIMEOUT_S):
                        await response.write(b"data: %b\n\n" % snapshot)
                except TimeoutError as error:
                    raise ConnectionResetError("the watcher reads nothing") from error
                await asyncio.sleep(INTERVAL_S)
            return response
        finally:
            self._feed.leave()

    async def _request(self, request: web.Request) -> web.Response:
        """Describe the way of one answer, with the decisions about it."""
        answer_id, dispatcher = request.match_info["id"], self._frontend.dispatcher
        journeys = dispatcher.journeys(answer_id)
        if not journeys:
            raise RequestError(
                f"no request {answer_id[:80]!r} is known here: it is too old, or another frontend process has it",
                http_status=404,
                field="id",
            )
        found = {"journeys": journeys, "decisions": dispatcher.explain(answer_id)}
        return web.Response(body=encode_json(found), content_type="application/json")

    async def _kill(self, request: web.Request) -> web.Response:
        """Kill a worker's process, for the demo."""
        if not self._frontend.config.page.kills_workers or self._supervisor is None:
            raise ForbiddenError(
                "this server kills no workers (frontend.page.kills_workers); penstock serve --demo does, to show what happens"
            )
        _check_own_page(request)
        await self._supervisor.kill(request.match_info["name"])
        return web.Response(status=204)


def _check_own_page(request: web.Request) -> None:
    """Check that the request comes from this server's own page, and from no other site in the same browser.

    A browser sends the header to another site only if that allows it (CORS), which `/watch` never does. A site that has its own
    name resolve to this machine (DNS rebinding) is of one origin with it, but its name is in `Host`.

    Raises:
        ForbiddenError: another page asks.
    """
    origin = request.headers.get("Origin")
    is_own = origin is None or origin.partition("://")[2] == request.host
    if request.headers.get(_KILL_HEADER) != "kill" or not is_own or not is_unnamed(name_of(request.host)):
        raise ForbiddenError(
            f"only the page at this server's own address may kill workers: open it by localhost or by IP address,"
            f" and send {_KILL_HEADER}: kill"
        )
