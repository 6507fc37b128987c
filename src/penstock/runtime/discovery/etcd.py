"""Discovery by etcd: a key for each worker, with the lease of its process, and a watch.

A client that loses etcd keeps what it knows. After each reconnect it lists all keys and watches from there, so that compaction
and a restart without data need no case of their own. A process whose lease has lapsed makes another and registers again.
"""

import asyncio
import base64
import json
import math
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import aiohttp

from penstock.core.errors import ConfigError, Unavailable
from penstock.core.ids import WorkerId
from penstock.core.listening import keepalive_socket
from penstock.core.log import get_logger
from penstock.core.types.instances import Instance, InstanceChange
from penstock.runtime.config import DiscoveryConfig
from penstock.runtime.credentials import Credentials, Password
from penstock.runtime.discovery.registrations import (
    RecordError,
    Records,
    Registrations,
    RegistryMetrics,
    StoredRegistration,
)
from penstock.runtime.discovery.view import RegistryView
from penstock.runtime.handshake import Identity
from penstock.runtime.tls import PlaneTlsConfig, registry_contexts

_REFUSED_TOKEN = ("user name is empty", "invalid auth token", "revision of auth store is old")
_UNAUTHENTICATED = 16
"""gRPC's code of a token that etcd does not take."""


class EtcdRefusal(Unavailable):
    """Etcd does not take the user, its password, or a call of it; it may, once an administrator has changed that."""


class EtcdUser:
    """The token of one client; etcd forgets it after minutes, and when it is started again. One event loop owns it."""

    def __init__(self, credentials: Credentials | None) -> None:
        """Ask for nothing yet: an etcd without authentication never wants to know.

        Raises:
            ConfigError: the account is none of etcd.
        """
        self._credentials = credentials
        self._lock = asyncio.Lock()
        self.token: str | None = None
        self._account()

    @property
    def headers(self) -> dict[str, str]:
        """Of each call."""
        return {} if self.token is None else {"Authorization": self.token}

    async def renew(
        self, refused: str | None, url: str, ask: Callable[[Password], Awaitable[str | None]]
    ) -> None:
        """Ask for another token than the one that was refused, unless another call has done so already.

        Args:
            refused: the token that etcd did not take; None where it asks for one.
            url: of the endpoint, for texts.
            ask: gives the token of a user by its password; None where etcd wants none.

        Raises:
            EtcdRefusal: no account is given, or etcd does not take it.
        """
        async with self._lock:
            if self.token != refused:
                return
            try:
                account = self._account()
            except ConfigError as error:
                raise EtcdRefusal(f"etcd at {url}: it asks for a user; {error.message}") from error
            if account is None:
                raise EtcdRefusal(
                    f"etcd at {url}: it asks for a user, and none is given; set {self.place} to USER:PASSWORD"
                )
            self.token = None  # with an expired one etcd refuses even to authenticate
            self.token = await ask(account)

    @property
    def place(self) -> str:
        """Where the account is given, for texts."""
        return "its credentials" if self._credentials is None else self._credentials.place

    def _account(self) -> Password | None:
        account = None if self._credentials is None else self._credentials.read()
        if account is not None and not isinstance(account, Password):
            raise ConfigError(
                f"{self.place}: has what only NATS takes; for etcd expected one line USER:PASSWORD"
            )
        return account


def is_token_refused(code: object, said: str) -> bool:
    """Whether etcd wants another token for a call, by gRPC's code and its text."""
    return code == _UNAUTHENTICATED or any(text in said for text in _REFUSED_TOKEN)


_PAGE_KEYS = 256
_LINE_BYTES_MAX = 16 << 20
_NOT_FOUND = 5
"""gRPC's code of a lease that has expired."""
_PERMISSION_DENIED = 7
_AUTHENTICATION_FAILED = "authentication failed"
_NO_AUTHENTICATION = "authentication is not enabled"


@dataclass(frozen=True, slots=True)
class KeyValue:
    key: bytes
    value: bytes
    is_deleted: bool = False


@dataclass(frozen=True, slots=True)
class _Answer:
    """An answer as JSON or, where `said` is given, an error of etcd with gRPC's code."""

    status: int
    content: dict[str, Any]
    code: object = None
    said: str | None = None


@dataclass(frozen=True, slots=True)
class Listing:
    """All keys of a range as of one revision."""

    revision: int
    pairs: Sequence[KeyValue]


class EtcdClient:
    """Calls to one of several endpoints, the next one after an error. One event loop owns it."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        timeout_s: float,
        tls: PlaneTlsConfig | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        """Connect to nothing yet.

        Args:
            urls: endpoints, `http://HOST:2379` or https.
            timeout_s: longest time of a call.
            tls: client certificate and authority for https; None for the system's authorities.
            credentials: of a user, where etcd asks for one.

        Raises:
            ConfigError: a certificate cannot be read, or the account is none of etcd.
        """
        self._urls = [url.rstrip("/") for url in urls]
        self._index = 0
        self._timeout_s = timeout_s
        self._contexts = registry_contexts(tls) if any(url.startswith("https:") for url in urls) else None
        self._user = EtcdUser(credentials)
        self._session: aiohttp.ClientSession | None = None

    @property
    def url(self) -> str:
        """The endpoint that is used now."""
        return self._urls[self._index]

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(socket_factory=keepalive_socket),
            timeout=aiohttp.ClientTimeout(total=None),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def grant(self, ttl_s: int) -> str:
        """Make a lease; returns its id.

        Raises:
            Unavailable: etcd does not answer in time, or with an error; likewise all other calls.
        """
        lease: str = (await self._call("lease/grant", {"TTL": ttl_s}))["ID"]
        return lease

    async def keep_alive(self, lease: str) -> bool:
        """Renew a lease; False where it has expired."""
        answer = await self._call("lease/keepalive", {"ID": lease}, missing={})
        return int(answer.get("result", {}).get("TTL", 0)) > 0

    async def revoke(self, lease: str) -> None:
        """End a lease, which deletes its keys."""
        await self._call("lease/revoke", {"ID": lease}, missing={})

    async def put(self, key: bytes, value: bytes, lease: str) -> bool:
        """Set a key for as long as its lease; False where that has expired."""
        body = {"key": _b64(key), "value": _b64(value), "lease": lease}
        return "header" in await self._call("kv/put", body, missing={})

    async def delete(self, key: bytes) -> None:
        await self._call("kv/deleterange", {"key": _b64(key)})

    async def probe(self, prefix: bytes) -> None:
        """Ask something that only an etcd with a quorum answers."""
        await self._call("kv/range", {"key": _b64(prefix), "count_only": True})

    async def read(self, prefix: bytes) -> Listing:
        """Read all keys with a prefix, in pages, as of one revision."""
        pairs: list[KeyValue] = []
        body = {"key": _b64(prefix), "range_end": _b64(_after(prefix)), "limit": _PAGE_KEYS}
        revision = 0
        while True:
            answer = await self._call("kv/range", body)
            revision = revision or int(answer["header"]["revision"])
            found = [_pair(each) for each in answer.get("kvs", ())]
            pairs += found
            if not answer.get("more") or not found:
                return Listing(revision, pairs)
            body |= {"key": _b64(found[-1].key + b"\0"), "revision": revision}

    async def watch(self, prefix: bytes, after: int) -> AsyncGenerator[list[KeyValue]]:
        """Yield changes of keys with a prefix after a revision; the first, empty, when etcd has begun.

        Raises:
            Unavailable: the connection ended, or the revision is compacted: list again.
        """
        create = {
            "key": _b64(prefix), "range_end": _b64(_after(prefix)), "start_revision": after + 1, "fragment": True,
        }  # fmt: skip
        url = self.url
        try:
            async with (
                self._post(f"{url}/v3/watch", {"create_request": create}) as response,
                aclosing(_lines(response)) as lines,
            ):
                async for line in lines:
                    result = _result_of(url, line)
                    yield [
                        _pair(event["kv"], is_deleted=event.get("type") == "DELETE")
                        for event in result.get("events", ())
                    ]
        except (aiohttp.ClientError, OSError, ValueError, KeyError) as error:
            raise self._failed(url, error) from error
        raise self._failed(url, None)

    def _rotate(self, failed: str) -> None:
        """Use the next endpoint, unless another call that failed has done so already."""
        if self.url == failed:
            self._index = (self._index + 1) % len(self._urls)

    async def _call(
        self, path: str, body: dict[str, Any], missing: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """POST; `missing` is the answer where etcd says that there is no such lease."""
        url = self.url
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._ask_as_user(url, path, body)
        except TimeoutError as error:
            self._rotate(url)
            self._user.token = None  # an etcd that has lost its data waits for the revision of one of before
            raise Unavailable(
                f"etcd at {url}: no answer within {self._timeout_s:g} s; is etcd running there?"
            ) from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise self._failed(url, error) from error
        if answer.said is None:
            return answer.content
        if missing is not None and (answer.code == _NOT_FOUND or "lease not found" in answer.said):
            return missing
        if answer.code == _PERMISSION_DENIED:
            raise EtcdRefusal(
                f"etcd at {url}: {path}: {answer.said}; give the user of {self._user.place} a role with readwrite on keys with the"
                " prefix /penstock/"
            )
        raise _error(url, path, answer)

    async def _ask_as_user(self, url: str, path: str, body: dict[str, Any]) -> _Answer:
        """Ask and, where etcd wants another token of the user, once more with one."""
        token = self._user.token
        answer = await self._ask(url, path, body)
        if answer.said is None or not is_token_refused(answer.code, answer.said):
            return answer

        async def sign_in(account: Password) -> str | None:
            given = {"name": account.user, "password": account.password}
            path = "auth/authenticate"
            answer = await self._ask(url, path, given)
            if answer.said is None:
                return str(answer.content["token"])
            if _NO_AUTHENTICATION in answer.said:
                return None
            if _AUTHENTICATION_FAILED in answer.said:
                raise EtcdRefusal(
                    f"etcd at {url}: user {account.user!r}: {answer.said}; expected its USER:PASSWORD in {self._user.place}"
                )
            raise _error(url, path, answer)

        await self._user.renew(token, url, sign_in)
        return await self._ask(url, path, body)

    async def _ask(self, url: str, path: str, body: dict[str, Any]) -> _Answer:
        async with self._post(f"{url}/v3/{path}", body) as response:
            text = await response.read()
        content = json.loads(text) if text else {}
        if response.status == 200 and isinstance(content, dict) and "error" not in content:
            return _Answer(response.status, content)
        said = content.get("error", content) if isinstance(content, dict) else content
        code = content.get("code") if isinstance(content, dict) else None
        if isinstance(said, dict):
            code, said = said.get("grpc_code", said.get("code", code)), said.get("message", said)
        return _Answer(response.status, {}, code, str(said))

    def _post(self, url: str, body: dict[str, Any]) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        if self._session is None or self._session.closed:
            raise Unavailable(f"etcd at {self.url}: the client is closed")
        return self._session.post(
            url,
            json=body,
            headers=self._user.headers,
            ssl=self._contexts() if self._contexts is not None else True,
        )

    def _failed(self, url: str, error: Exception | None) -> Unavailable:
        self._rotate(url)
        said = str(error or "it ended the connection").partition("\n")[0]
        return Unavailable(f"etcd at {url}: {said}; is etcd running there?")


def _error(url: str, path: str, answer: _Answer) -> Unavailable:
    return Unavailable(f"etcd at {url}: {path}: HTTP {answer.status}: {str(answer.said)[:200]}")


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


def _result_of(url: str, line: bytes) -> dict[str, Any]:
    message = json.loads(line)
    if "error" in message:
        raise Unavailable(f"etcd at {url}: watch: {str(message['error'])[:200]}")
    result: dict[str, Any] = message["result"]
    if result.get("canceled"):
        why = result.get("cancel_reason") or "its revision is compacted"
        raise Unavailable(f"etcd at {url}: the watch was canceled: {why}")
    return result


def _pair(data: dict[str, str], *, is_deleted: bool = False) -> KeyValue:
    value = base64.b64decode(data.get("value", ""))
    return KeyValue(base64.b64decode(data["key"]), value, is_deleted)


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _after(prefix: bytes) -> bytes:
    """Give the first key behind all keys with a prefix."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


_WITHDRAWN = b""
"""Value of a key whose worker withdraws it, just before it is deleted; one deleted without it has lapsed."""
_log = get_logger()


class EtcdDiscovery:
    """A client of etcd; it works while its context is entered. One event loop owns it."""

    def __init__(
        self,
        urls: Sequence[str],
        identity: Identity,
        *,
        namespace: str,
        rng: random.Random,
        tls: PlaneTlsConfig | None = None,
        credentials: Credentials | None = None,
        config: DiscoveryConfig | None = None,
        metrics: RegistryMetrics | None = None,
    ) -> None:
        """Make a client.

        Args:
            urls: endpoints of etcd, `http://HOST:2379` or https.
            identity: has the deployment's secret and hash key.
            namespace: of the deployment; keys are `/penstock/NAMESPACE/workers/ID`.
            rng: for jitter.
            tls: certificates for https.
            credentials: of etcd's user, where it asks for one.
            config: bounds and times.
            metrics: of this client; None for none.

        Raises:
            ConfigError: a certificate cannot be read, or the account is none of etcd.
        """
        self._config = config or DiscoveryConfig()
        self._client = EtcdClient(
            urls, timeout_s=self._config.connect_timeout_s, tls=tls, credentials=credentials
        )
        self._records = Records(identity)
        self._metrics = metrics or RegistryMetrics(None)
        self._namespace = namespace
        self._prefix = f"/penstock/{namespace}/workers/".encode()
        self._rng = rng
        self._view = RegistryView(
            self._records,
            self._metrics,
            grace_s=self._config.lease_ttl_s,
            instances_max=self._config.instances_max,
            watchers_max=self._config.connections_max,
            is_reachable=lambda: self._is_watching,
        )
        self._ttl_s = max(1, math.ceil(self._config.lease_ttl_s))
        self._lease: str | None = None
        self._registrations = Registrations(self._config, problem=lambda: self._problem)
        self._is_watching = False
        self._problem = "it does not answer; is etcd running there?"
        self._watcher: asyncio.Task[None] | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._tasks = asyncio.TaskGroup()
        self._closed = False

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        await self._tasks.__aenter__()
        self._keeper = self._tasks.create_task(self._keep_registered(), name="etcd lease")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
        await self._tasks.__aexit__(None, None, None)
        await self._client.__aexit__(None, None, None)

    async def connect(self) -> None:
        """Check that etcd answers, and that no other deployment uses the namespace.

        Raises:
            Unavailable: etcd does not answer in time.
            ConfigError: etcd does not take this user, or workers of another secret, hash key or release are registered there.
        """
        try:
            listing = await self._client.read(self._prefix)
        except EtcdRefusal as error:
            raise ConfigError(error.message) from error
        for pair in listing.pairs:
            if pair.value == _WITHDRAWN:
                continue
            try:
                self._records.decode(pair.value)
            except RecordError as error:
                raise ConfigError(
                    f"etcd at {self._client.url}: namespace {self._namespace}: worker {pair.key[len(self._prefix) :].decode()}"
                    f" is registered there, and {error.message}"
                ) from error

    async def register(self, instance: Instance) -> StoredRegistration:
        return await self._registrations.register(instance)

    def watch(self) -> AsyncIterator[InstanceChange]:
        if self._watcher is None and not self._closed:
            self._watcher = self._tasks.create_task(self._keep_watching(), name="etcd watch")
        return self._view.watch()

    async def close(self) -> None:
        """Withdraw all registrations, and end every watch. Safe twice."""
        if self._closed:
            return
        self._closed = True
        self._view.close()
        try:
            async with asyncio.timeout(self._config.connect_timeout_s):
                await self._registrations.close()
                if self._lease is not None:
                    await self._client.revoke(self._lease)
        except (TimeoutError, Unavailable) as error:
            _log.warning("lease_not_revoked", error=str(error), fix="it expires by itself")
        for task in (self._keeper, self._watcher):
            if task is not None:
                task.cancel()

    async def _keep_registered(self) -> None:
        """Keep the lease, and store what changes; after an error all again."""
        tries = 0
        while True:
            try:
                if tries:
                    await asyncio.sleep(self._config.retry_delay_s(tries, self._rng))
                else:
                    await self._registrations.until_due(
                        self._config.lease_ttl_s / 3 if self._registrations.current else None
                    )
                await self._store()
                if tries and self._lease is not None:
                    _log.info("registry_reached", registry=self._client.url)
                tries = 0
            except Unavailable as error:
                self._problem = str(error)
                if tries == 0:
                    _log.warning("registry_unreachable", error=error.message)
                tries += 1

    async def _store(self) -> None:
        client, registrations = self._client, self._registrations
        if self._lease is not None and not await client.keep_alive(self._lease):
            _log.warning("lease_lost", registry=client.url, workers=len(registrations.current))
            self._lease = None
        if self._lease is None:
            registrations.resend_all()
        for registration, instance in registrations.unsent():
            if instance is None and self._lease is None:  # what was withdrawn has expired with its lease
                registrations.sent(registration, instance)
                continue
            if self._lease is None:
                self._lease = await client.grant(self._ttl_s)
            key = self._key(registration.instance.worker_id)
            value = _WITHDRAWN if instance is None else self._records.encode(instance)
            if not await client.put(key, value, self._lease):
                self._lease = None
                raise Unavailable(f"etcd at {client.url}: the lease has expired meanwhile")
            if instance is None:
                await client.delete(key)
            registrations.sent(registration, instance)

    async def _keep_watching(self) -> None:
        """Watch; after an error list all again. The end of a watch by an error may swallow a cancellation, so `close` is looked at."""
        tries = 0
        while True:
            try:
                async with asyncio.TaskGroup() as group:
                    probing = group.create_task(self._probe())
                    try:
                        await self._watch_once()
                    finally:
                        probing.cancel()
            except* Unavailable as errors:
                error = errors.exceptions[0]
                self._problem = str(error)
                tries = 1 if self._is_watching else tries + 1
                if tries == 1:
                    _log.warning("registry_lost", error=str(error), known_instances=len(self._view))
            if self._is_watching:
                self._metrics.losses.inc()
            self._is_watching = False
            self._metrics.connected.set(0)
            if self._closed:
                return
            await asyncio.sleep(self._config.retry_delay_s(tries, self._rng))

    async def _watch_once(self) -> None:
        listing = await self._client.read(self._prefix)
        self._apply(listing.pairs)
        present = {
            worker_id
            for pair in listing.pairs
            if pair.value != _WITHDRAWN and (worker_id := self._worker_id(pair.key)) is not None
        }
        self._view.sync(present)
        async with aclosing(self._client.watch(self._prefix, listing.revision)) as changes:
            async for pairs in changes:
                if not self._is_watching:
                    self._is_watching = True
                    self._metrics.connected.set(1)
                    _log.info("registry_connected", registry=self._client.url, workers=len(present))
                self._apply(pairs)

    async def _probe(self) -> None:
        """Ask etcd something now and then: a watch of a server that hangs says nothing.

        Raises:
            Unavailable: it does not answer.
        """
        while True:
            await asyncio.sleep(self._config.lease_ttl_s / 3)
            await self._client.probe(self._prefix)

    def _apply(self, pairs: Sequence[KeyValue]) -> None:
        for pair in pairs:
            worker_id = self._worker_id(pair.key)
            if worker_id is None:
                continue
            if pair.is_deleted:
                self._view.lapse(worker_id, "lease expired")
            elif pair.value == _WITHDRAWN:
                self._view.withdraw(worker_id, "withdrawn")
            else:
                self._view.put(worker_id, pair.value)

    def _key(self, worker_id: WorkerId) -> bytes:
        return self._prefix + f"{worker_id:016x}".encode()

    def _worker_id(self, key: bytes) -> WorkerId | None:
        if not key.startswith(self._prefix):
            return None
        try:
            return WorkerId(int(key[len(self._prefix) :], 16))
        except ValueError:
            return None
