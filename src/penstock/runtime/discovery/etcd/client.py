"""The few calls of etcd v3 that discovery needs, by its JSON gateway."""

import asyncio
import base64
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import aiohttp

from penstock.core.errors import Unavailable
from penstock.core.net.keepalive import keepalive_socket
from penstock.runtime.credentials import Credentials, Password
from penstock.runtime.discovery.etcd.user import EtcdRefusal, EtcdUser, is_token_refused
from penstock.runtime.tls import PlaneTlsConfig, registry_contexts

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
