"""Kubernetes' API: access from within and outside a pod, calls, and objects watched as they change."""

import asyncio
import base64
import binascii
import json
import os
import random
import ssl
import tempfile
from collections.abc import AsyncGenerator, Mapping
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, cast
from urllib.parse import urlsplit

import aiohttp

from penstock.core.certificates import load_pair, reason
from penstock.core.document import parse_yaml
from penstock.core.errors import ConfigError, Unavailable
from penstock.core.files import WatchedFiles
from penstock.core.listening import keepalive_socket
from penstock.core.log import get_logger

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_HOST, _PORT, _CONFIG = "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT", "KUBECONFIG"
Pem = Path | bytes
"""Certificates or a key: a file, or its content."""
_log = get_logger()


class KubernetesAccess:
    """An API server, and the credentials for it. One event loop owns it."""

    def __init__(
        self,
        server: str,
        *,
        namespace: str,
        token: str | None = None,
        token_file: Path | None = None,
        authority: Pem | None = None,
        pair: tuple[Pem, Pem] | None = None,
        verify: bool = True,
    ) -> None:
        """Read the files.

        Args:
            server: `https://HOST:PORT`.
            namespace: where objects of this process are.
            token: a bearer token, or
            token_file: the file that has one.
            authority: PEM with the certificates that sign the server's; None for the system's.
            pair: PEM with a client certificate, and its key.
            verify: whether the server's certificate is checked.

        Raises:
            ConfigError: a file cannot be read.
        """
        self.server = server.rstrip("/")
        self.namespace = namespace
        self._token = token
        self._token_file = token_file
        self._authority = authority
        self._pair = pair
        self._verify = verify
        self._token_watch = WatchedFiles(*([token_file] if token_file else []))
        self._tls_watch = WatchedFiles(
            *(each for each in (authority, *(pair or ())) if isinstance(each, Path))
        )
        if token_file is not None:
            self._token = _read(token_file, "service account")
        self._context = self._make_context()

    @classmethod
    def find(
        cls, environment: Mapping[str, str] = os.environ, *, service_account: Path = SERVICE_ACCOUNT
    ) -> Self:
        """Take the kubeconfig that KUBECONFIG names, else the pod's service account, else `~/.kube/config`.

        Raises:
            ConfigError: there is none of them, or it cannot be used; the text says why.
        """
        if environment.get(_CONFIG):
            return cls.of_config(Path(environment[_CONFIG]).expanduser())
        host, port = environment.get(_HOST), environment.get(_PORT, "443")
        if host:
            bracketed = f"[{host}]" if ":" in host else host
            return cls(
                f"https://{bracketed}:{port}",
                namespace=_read(service_account / "namespace", "service account"),
                token_file=service_account / "token",
                authority=service_account / "ca.crt",
            )
        default = Path("~/.kube/config").expanduser()
        if default.exists():
            return cls.of_config(default)
        raise ConfigError(
            f"kubernetes: this is no pod ({_HOST} is not set), and neither {_CONFIG} nor {default} is there; run in a"
            f" cluster, or set {_CONFIG}"
        )

    @classmethod
    def of_config(cls, path: Path) -> Self:
        """Use the current context of a kubeconfig.

        Raises:
            ConfigError: it cannot be read, or needs what is not supported: plug-ins, passwords.
        """
        data = parse_yaml(_read(path, _CONFIG), source=str(path))
        context = _named(data, "contexts", "context", data.get("current-context"), path)
        cluster = _named(data, "clusters", "cluster", context.get("cluster"), path)
        user = _named(data, "users", "user", context.get("user"), path) if context.get("user") else {}
        for key in ("exec", "auth-provider", "username"):
            if key in user:
                raise ConfigError(
                    f"{path}: user {context['user']}: {key} is not supported; use a token, tokenFile or client certificate"
                    " (kubectl create token makes one)"
                )
        pair = [_pem(user, name, path) for name in ("client-certificate", "client-key")]
        token_file = path.parent / user["tokenFile"] if "tokenFile" in user else None
        server = cluster.get("server", "")
        if urlsplit(server).scheme not in {"http", "https"}:
            raise ConfigError(
                f"{path}: cluster {context['cluster']}: server must be https://HOST:PORT, got {server!r}"
            )
        return cls(
            server,
            namespace=context.get("namespace", "default"),
            token=user.get("token"),
            token_file=token_file,
            authority=_pem(cluster, "certificate-authority", path),
            pair=(pair[0], pair[1]) if pair[0] and pair[1] else None,
            verify=not cluster.get("insecure-skip-tls-verify", False),
        )

    def headers(self) -> dict[str, str]:
        """Give the headers that say who asks; a token that was replaced is the new one."""
        if self._token_file is not None and self._token_watch.changed():
            try:
                self._token = _read(self._token_file, "service account")
            except ConfigError as error:
                _log.warning("token_not_read", error=error.message, fix="the one before is used")
        return {} if self._token is None else {"Authorization": f"Bearer {self._token}"}

    def context(self) -> ssl.SSLContext | None:
        """Give the TLS context for new connections; None for a server without TLS."""
        if self._context is not None and self._tls_watch.changed():
            try:
                self._context = self._make_context()
            except ConfigError as error:
                _log.warning("certificate_not_reloaded", error=error.message, fix="those before are used")
        return self._context

    def _make_context(self) -> ssl.SSLContext | None:
        if not self.server.startswith("https:"):
            return None
        with ExitStack() as stack:
            authority = None if self._authority is None else _as_file(self._authority, stack)
            try:
                context = ssl.create_default_context(cafile=authority)
            except OSError as error:
                place = self._authority if isinstance(self._authority, Path) else "certificate-authority-data"
                raise ConfigError(f"kubernetes: {place}: {reason(error)}; expected PEM") from error
            if not self._verify:
                context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            if self._pair is not None:
                certificate, key = (_as_file(each, stack) for each in self._pair)
                place = "kubernetes" if isinstance(self._pair[1], Path) else "kubernetes: client-key-data"
                load_pair(context, str(certificate), str(key), place=place)
        return context


def _read(path: Path, source: str) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"kubernetes: {source}: {path}: {why}; expected a readable file") from error


def _named(data: Any, plural: str, kind: str, name: Any, path: Path) -> dict[str, Any]:
    """Find an entry of a kubeconfig by its name."""
    entries = data.get(plural) or () if isinstance(data, dict) else ()
    for entry in entries:
        if isinstance(entry, dict) and entry.get("name") == name and isinstance(entry.get(kind), dict):
            found: dict[str, Any] = entry[kind]
            return found
    names = ", ".join(str(entry.get("name")) for entry in entries if isinstance(entry, dict)) or "none"
    raise ConfigError(
        f"{path}: {plural} has no {name!r}, but {names}; kubectl config use-context NAME chooses one"
    )


def _pem(entry: dict[str, Any], key: str, path: Path) -> Pem | None:
    """Give what a kubeconfig's entry names, or has inside."""
    if f"{key}-data" in entry:
        try:
            return base64.b64decode(entry[f"{key}-data"], validate=True)
        except (binascii.Error, TypeError, ValueError) as error:
            raise ConfigError(f"{path}: {key}-data: {error}; expected PEM in base64") from error
    return path.parent / entry[key] if key in entry else None


def _as_file(pem: Pem, stack: ExitStack) -> Path:
    """Give a file for OpenSSL, which reads nothing else; content is in a private one until `stack` ends."""
    if isinstance(pem, Path):
        return pem
    file = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-kube-")), "content.pem")
    file.write_bytes(pem)
    return file


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

        A connection whose other host no longer answers is an error within 8 s (`core.listening`). One that stays silent beyond its
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


POD_NAME, POD_UID = "PENSTOCK_POD_NAME", "PENSTOCK_POD_UID"
"""Variables that a pod's downward API sets."""


@dataclass(frozen=True, slots=True)
class Pod:
    """The pod of this process."""

    name: str
    uid: str

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Self | None:
        """Read the downward API's variables; None where they are not set, as outside of a cluster."""
        name, uid = environment.get(POD_NAME), environment.get(POD_UID)
        return cls(name, uid) if name and uid else None


_WATCH_S = 300
_RELIST = {400, 410, 504}
"""Answers to a watch from a resourceVersion that the server does not have any more, or not yet as after a restored backup."""
_CUTS_TOLD = 3
"""A warning says so after so many watches that ended at once."""
_CUT_FIX = (
    "let proxies before the API server keep responses open for minutes; changes are seen late meanwhile"
)


class Follower(Protocol):
    """Takes what a reflector sees, in its order."""

    def listed(self, objects: list[Object]) -> None:
        """Take all objects that there are; what is not among them is gone."""
        ...

    def put(self, body: Object) -> None:
        """Take an object that is new or has changed."""
        ...

    def deleted(self, body: Object) -> None:
        """Take the last state of an object that is gone, or no longer chosen by the selector."""
        ...

    def connected(self) -> None:
        """Note that the server answers, after a list or a cut."""
        ...

    def lost(self, error: Unavailable) -> None:
        """Note that it does not; called again for each try."""
        ...


@dataclass(frozen=True, slots=True)
class Pace:
    """Times of a reflector, in seconds.

    Attributes:
        probe_s: a server is asked something so often, since the watch of one that hangs is silent.
        retry_s: the first pause after an error; doubles up to `retry_s_max`. A watch that lasts less than that counts as an error.
    """

    probe_s: float
    retry_s: float
    retry_s_max: float


class Reflector:
    """Follows one kind of objects. One event loop owns it."""

    def __init__(
        self,
        client: KubernetesClient,
        resource: Resource,
        labels: str,
        follower: Follower,
        *,
        pace: Pace,
        rng: random.Random,
    ) -> None:
        """Follow nothing yet; `labels` is a label selector, `rng` gives jitter."""
        self._client = client
        self._resource = resource
        self._labels = labels
        self._follower = follower
        self._pace = pace
        self._rng = rng
        self._revision: str | None = None
        self._is_connected = False
        self._watching: asyncio.Timeout | None = None
        self._silence: Unavailable | None = None

    async def run(self) -> None:
        """Follow until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._probe())
            await self._keep_following()

    async def _keep_following(self) -> None:
        tries, loop = 0, asyncio.get_running_loop()
        while True:
            self._is_connected = False
            begun_s = loop.time()
            error: Unavailable | None = None
            try:
                async with asyncio.timeout(None) as self._watching:
                    await self._follow()
            except TimeoutError:
                error = self._silence
            except Unavailable as caught:
                error = caught
            if self._is_connected and loop.time() - begun_s >= self._pace.retry_s_max:
                tries = 0
            self._is_connected = False
            if error is None:  # the server ends each watch after a while; a proxy may do so at once
                if loop.time() - begun_s < self._pace.retry_s_max:
                    tries += 1
                    if tries == _CUTS_TOLD:
                        _log.warning("watches_cut_short", kind=self._resource.kind, fix=_CUT_FIX)
                    await asyncio.sleep(self._delay_s(tries, None))
                continue
            if isinstance(error, KubernetesError) and error.status in _RELIST:
                self._revision = None
                if tries == 0:  # at once, the first time
                    tries = 1
                    continue
            self._follower.lost(error)
            tries += 1
            await asyncio.sleep(self._delay_s(tries, error.retry_after_s))

    async def _follow(self) -> None:
        """List unless it is known from where to go on, and watch until the server ends that."""
        if self._revision is None:
            listing = await self._client.list(self._resource, self._labels)
            self._revision = listing.revision
            self._follower.listed(listing.objects)
        seconds = self._rng.randint(_WATCH_S, 2 * _WATCH_S)
        events = self._client.watch(self._resource, self._labels, self._revision, seconds=seconds)
        async with aclosing(events):
            async for event in events:
                if event is None:
                    self._is_connected = True
                    self._follower.connected()
                    continue
                if event.type == "DELETED":
                    self._follower.deleted(event.object)
                elif event.type in {"ADDED", "MODIFIED"}:
                    self._follower.put(event.object)
                self._revision = event.object["metadata"]["resourceVersion"]

    async def _probe(self) -> None:
        """Ask the server now and then, and end a watch whose server does not answer."""
        while True:
            await asyncio.sleep(self._pace.probe_s)
            try:
                await self._client.list(self._resource, self._labels, limit=1)
            except KubernetesError:
                continue  # it answers; a watch says by itself what is wrong
            except Unavailable as error:
                if self._is_connected and self._watching is not None:
                    self._silence = error
                    self._watching.reschedule(asyncio.get_running_loop().time())

    def _delay_s(self, tries: int, wanted_s: float | None) -> float:
        longest_s: float = min(self._pace.retry_s * 2 ** min(tries, 16), self._pace.retry_s_max)
        return max(longest_s * self._rng.uniform(0.5, 1.0), wanted_s or 0.0)
