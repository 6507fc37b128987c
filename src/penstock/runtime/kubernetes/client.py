"""The few calls of the Kubernetes API that Penstock needs, over the HTTP client that frontends have anyway."""

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, cast

import aiohttp

from penstock.core.errors import Unavailable
from penstock.core.net.keepalive import keepalive_socket
from penstock.runtime.kubernetes.access import KubernetesAccess

Object = dict[str, Any]
"""An object as JSON has it."""
_PAGE_OBJECTS = 500
_LINE_BYTES_MAX = 16 << 20
_MERGE, _APPLY = "application/merge-patch+json", "application/apply-patch+yaml"
_USER_AGENT = "penstock"


@dataclass(frozen=True, slots=True)
class Resource:
    """A kind of objects; `group` is empty for the core."""

    group: str
    version: str
    plural: str
    kind: str
    is_namespaced: bool = True

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str, name: str = "", subresource: str = "") -> str:
        base = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        place = f"/namespaces/{namespace}" if self.is_namespaced else ""
        return "/".join(filter(None, (f"{base}{place}/{self.plural}", name, subresource)))


LEASES = Resource("coordination.k8s.io", "v1", "leases", "Lease")


class KubernetesError(Unavailable):
    """An answer with an error's status.

    Attributes:
        status: the HTTP status, such as 409.
        reason: Kubernetes' word for it, such as `AlreadyExists`.
    """

    def __init__(
        self, message: str, *, status: int, reason: str = "", retry_after_s: float | None = None
    ) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.status = status
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Listing:
    """All objects of a kind as of one resourceVersion."""

    revision: str
    objects: list[Object]


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """`type` is ADDED, MODIFIED, DELETED or BOOKMARK; of the last only the object's resourceVersion says something."""

    type: str
    object: Object


class KubernetesClient:
    """Calls in the namespace of its access. One event loop owns it; it works while its context is entered.

    Errors of all calls: Unavailable, the server does not answer in time; KubernetesError, it answers with an error's status.
    """

    def __init__(self, access: KubernetesAccess, *, timeout_s: float) -> None:
        """Connect to nothing yet; `timeout_s` is the longest time of a call, watches excepted."""
        self.access = access
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    @property
    def namespace(self) -> str:
        return self.access.namespace

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(socket_factory=keepalive_socket),
            timeout=aiohttp.ClientTimeout(total=None),
            headers={"User-Agent": _USER_AGENT},
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def get(self, resource: Resource, name: str, subresource: str = "") -> Object:
        return await self._call("GET", resource.path(self.namespace, name, subresource))

    async def find(self, resource: Resource, name: str) -> Object | None:
        """Give an object; None where there is none."""
        try:
            return await self.get(resource, name)
        except KubernetesError as error:
            if error.status == 404:
                return None
            raise

    async def list(
        self,
        resource: Resource,
        labels: str = "",
        *,
        limit: int | None = None,
        page_objects: int = _PAGE_OBJECTS,
    ) -> Listing:
        """Read all objects that a label selector chooses, in pages; with `limit` at most so many."""
        found: list[Object] = []
        query: dict[str, str] = {"limit": str(limit or page_objects), "labelSelector": labels}
        while True:
            answer = await self._call("GET", resource.path(self.namespace), query)
            found += answer.get("items") or ()
            token = answer["metadata"].get("continue")
            if not token or limit is not None:
                return Listing(answer["metadata"]["resourceVersion"], found)
            query["continue"] = token

    async def count(self, resource: Resource) -> int:
        """Count all objects of a kind in the namespace, of which only one is read."""
        answer = await self._call("GET", resource.path(self.namespace), {"limit": "1"})
        return len(answer.get("items") or ()) + int(answer["metadata"].get("remainingItemCount") or 0)

    async def create(self, resource: Resource, body: Object) -> Object:
        return await self._call("POST", resource.path(self.namespace), body=body)

    async def replace(self, resource: Resource, body: Object, subresource: str = "") -> Object:
        """Replace an object; one that has changed since its resourceVersion is an error 409."""
        return await self._call(
            "PUT", resource.path(self.namespace, body["metadata"]["name"], subresource), body=body
        )

    async def patch(self, resource: Resource, name: str, body: Object, subresource: str = "") -> Object:
        """Change the fields that a merge patch names."""
        path = resource.path(self.namespace, name, subresource)
        return await self._call("PATCH", path, body=body, content=_MERGE)

    async def apply(
        self, resource: Resource, body: Object, *, manager: str, force: bool = True, subresource: str = ""
    ) -> Object:
        """Apply an object by server-side apply: fields that `manager` applied before and no longer names are removed.

        Args:
            resource: its kind.
            body: with the fields that the manager wants, and no others.
            manager: the field manager.
            force: take fields that others manage; else they are an error 409.
            subresource: `status`, or empty.
        """
        query = {"fieldManager": manager} | ({"force": "true"} if force else {})
        path = resource.path(self.namespace, body["metadata"]["name"], subresource)
        return await self._call("PATCH", path, query, body, content=_APPLY)

    async def delete(
        self, resource: Resource, name: str, *, uid: str | None = None, revision: str | None = None
    ) -> bool:
        """Delete an object, one of this uid and resourceVersion only; False where there is none."""
        wanted = {"uid": uid, "resourceVersion": revision}
        conditions = {key: value for key, value in wanted.items() if value is not None}
        body: Object = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        try:
            await self._call(
                "DELETE",
                resource.path(self.namespace, name),
                body=body | ({"preconditions": conditions} if conditions else {}),
            )
        except KubernetesError as error:
            if error.status == 404:
                return False
            raise
        return True

    async def watch(
        self, resource: Resource, labels: str, revision: str, *, seconds: int
    ) -> AsyncGenerator[WatchEvent | None]:
        """Yield None when the server has begun, then changes after a resourceVersion and bookmarks, for so many seconds.

        A connection whose other host no longer answers is an error within 8 s (`core.net.keepalive`). One that stays silent beyond its
        time, as behind a proxy that lost the server, ends a call's time later, as if the server had ended it.

        Raises:
            KubernetesError: status 410, the resourceVersion is too old: list again.
        """
        query = {
            "watch": "1", "allowWatchBookmarks": "true", "labelSelector": labels, "resourceVersion": revision,
            "timeoutSeconds": str(seconds),
        }  # fmt: skip
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await self._request("GET", resource.path(self.namespace), query)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._failed(error) from error
        async with response:
            if response.status != 200:
                raise self._refused(response, await self._text(response))
            yield None
            deadline_s = asyncio.get_running_loop().time() + seconds + self._timeout_s
            lines = _lines(response)
            try:
                while True:
                    try:
                        async with asyncio.timeout_at(deadline_s) as deadline:
                            line = await anext(lines, None)
                    except TimeoutError:
                        if not deadline.expired():
                            raise
                        return
                    if line is None:
                        return
                    yield _event_of(self.access.server, line)
            except (aiohttp.ClientError, OSError, ValueError, KeyError, TypeError) as error:
                raise self._failed(error) from error

    async def _call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        *,
        content: str = "application/json",
    ) -> Object:
        data = None if body is None else json.dumps(body).encode()
        try:
            async with asyncio.timeout(self._timeout_s):
                async with await self._request(method, path, query, data, content) as response:
                    text = await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._failed(error) from error
        if response.status >= 300:
            raise self._refused(response, text)
        try:
            answer = json.loads(text)
        except ValueError as error:
            raise self._failed(error) from error
        if method != "DELETE" and not _is_versioned(answer):
            raise self._failed(ValueError("its answer is no object of Kubernetes: does a proxy answer?"))
        return cast("Object", answer)

    async def _request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        data: bytes | None = None,
        content: str = "application/json",
    ) -> aiohttp.ClientResponse:
        if self._session is None or self._session.closed:
            raise Unavailable(f"Kubernetes at {self.access.server}: the client is closed")
        context = self.access.context()
        return await self._session.request(
            method,
            self.access.server + path,
            params=dict(query or {}),
            data=data,
            headers={"Content-Type": content, **self.access.headers()},
            ssl=True if context is None else context,
        )

    async def _text(self, response: aiohttp.ClientResponse) -> bytes:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> Unavailable:
        said = f"no answer within {self._timeout_s:g} s" if isinstance(error, TimeoutError) else str(error)
        return Unavailable(f"Kubernetes at {self.access.server}: {said or type(error).__name__}")

    def _refused(self, response: aiohttp.ClientResponse, text: bytes) -> KubernetesError:
        try:
            status = json.loads(text)
        except ValueError:
            status = {}
        if not isinstance(status, dict) or "message" not in status:
            status = {"message": text[:200].decode(errors="replace") or response.reason}
        retry = response.headers.get("Retry-After", "")
        return _error_of(
            self.access.server,
            {**status, "code": response.status},
            retry_after_s=float(retry) if retry.isdecimal() else None,
        )


def _event_of(server: str, line: bytes) -> WatchEvent:
    """Read a line of a watch; raises KubernetesError for the server's own, and ValueError, KeyError or TypeError for what is no event."""
    event = json.loads(line)
    type_, body = event["type"], event["object"]
    if type_ == "ERROR" and isinstance(body, dict):
        raise _error_of(server, body)
    if not (_is_versioned(body) if type_ == "BOOKMARK" else _is_named(body)):
        raise ValueError("its watch tells of what is no object")
    return WatchEvent(type_, body)


def _error_of(server: str, status: Object, *, retry_after_s: float | None = None) -> KubernetesError:
    code = int(status.get("code") or 500)
    return KubernetesError(
        f"Kubernetes at {server}: HTTP {code}: {str(status.get('message'))[:1000]}",
        status=code,
        reason=str(status.get("reason") or ""),
        retry_after_s=retry_after_s,
    )


def _is_versioned(body: object) -> bool:
    """Whether an answer has what every object and list has: a proxy that answers by itself gives anything."""
    if not isinstance(body, dict) or not isinstance(metadata := body.get("metadata"), dict):
        return False
    items = body.get("items") or []
    return (
        isinstance(metadata.get("resourceVersion"), str)
        and isinstance(items, list)
        and all(map(_is_named, items))
    )


def _is_named(body: object) -> bool:
    return _is_versioned(body) and isinstance(cast("Object", body)["metadata"].get("name"), str)


async def _lines(response: aiohttp.ClientResponse) -> AsyncGenerator[bytes]:
    """Yield the lines of a response; ValueError for a longer one than `_LINE_BYTES_MAX`."""
    buffer = bytearray()
    async for data in response.content.iter_any():
        buffer += data
        *lines, rest = buffer.split(b"\n")
        for line in lines:
            yield bytes(line)
        buffer = bytearray(rest)
        if len(buffer) > _LINE_BYTES_MAX:
            raise ValueError(f"a line of more than {_LINE_BYTES_MAX} bytes")
