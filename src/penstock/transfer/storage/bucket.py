"""An object store through `obstore`, with a time limit for every request and this library's errors."""

import asyncio
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from penstock.core.errors import TransferError, TransferRefused

_TEXT_MAX = 300
_YES = frozenset({"1", "on", "true", "y", "yes"})
"""Values of AWS_ALLOW_HTTP that allow HTTP; obstore reads the variable itself only without client options."""
_BACKOFF = {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=1), "base": 2}
_CONNECT_S = 5.0
_LIST_PAGE = 1000
_NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|bucket does not exist")

_ENDS_BEFORE = re.compile(r"InvalidRange|Invalid range|Range Not Satisfiable|range was invalid")


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An object in a list.

    Attributes:
        key: of the object.
        size_bytes: of the object.
        modified_s: date of its last change by the store's clock, in seconds since the epoch.
    """

    key: str
    size_bytes: int
    modified_s: float


class Bucket:
    """An object store.

    Attributes:
        name: for messages; without secrets.
    """

    def __init__(
        self, store: object, options: Mapping[str, str], *, request_timeout_s: float, retries: int
    ) -> None:
        """Open the store; nothing is sent yet.

        Args:
            store: a URL (`s3://`, `gs://`, `az://`, `file://`, `memory://`), or a store of obstore's, which has its own
                timeouts and retries.
            options: for a URL: keys, region, endpoint, as obstore names them.
            request_timeout_s: timeout of one request with its retries.
            retries: of one request, after errors 5xx and lost connections.

        Raises:
            TransferRefused: obstore is not installed, or the URL or an option is wrong.
        """
        try:
            import obstore  # noqa: PLC0415 - an extra
            from obstore.store import from_url  # noqa: PLC0415
        except ImportError as error:
            raise TransferRefused(
                f"{store}: object stores need obstore, which is not installed: pip install 'penstock-llm[object]'"
            ) from error
        self._obstore = obstore
        self._failures = (obstore.exceptions.BaseError, OSError)
        self._timeout_s = request_timeout_s
        text = str(store).rstrip("/")
        self.name = type(store).__name__ if text.startswith("<") else text
        if not isinstance(store, str):
            self._store: Any = store
            return
        try:
            self._store = from_url(store, **_settings(store, options, request_timeout_s, retries))
        except (*self._failures, ValueError, TypeError) as error:
            raise TransferRefused(f"{store}: {_text(error)}") from error

    async def get(self, key: str, start: int, end: int) -> memoryview | None:
        """Get a range of bytes of an object, fewer if it ends before; None if there is no such object.

        A cancellation abandons the request at once.

        Raises:
            TransferError: it failed, or took too long.
        """
        what = f"getting bytes {start} to {end} of {self.name}/{key}"
        request = self._obstore.get_range_async(self._store, key, start=start, end=end)
        try:
            return memoryview(await self._bounded(request, what))
        except FileNotFoundError as error:
            if _NO_BUCKET.search(str(error)):
                raise TransferRefused(f"{what}: {_text(error)}") from error
            return None
        except self._failures as error:
            if _ENDS_BEFORE.search(str(error)):
                return memoryview(b"")
            raise self._worded(what, error) from error

    async def put(self, key: str, data: bytearray) -> None:
        """Put an object as a whole. A cancellation waits for the end of the request, so that no put arrives later.

        Raises:
            TransferError: it failed, or took too long; the object may have been put, or be put later.
        """
        what = f"putting {len(data)} bytes to {self.name}/{key}"
        request = self._obstore.put_async(self._store, key, data, use_multipart=False)
        try:
            await self._bounded(request, what, sees_it_through=True)
        except self._failures as error:
            raise self._worded(what, error) from error

    async def create(self, key: str, pieces: Sequence[Any], *, may_replace: bool = False) -> bool:
        """Put an object of these pieces unless the key exists; returns whether it was put. A cancellation abandons the request.

        Args:
            key: of the object.
            pieces: buffers, one after the other.
            may_replace: put it even if the key exists.

        Raises:
            TransferError: it failed, or took too long; the object may have been put, or be put later.
        """
        what = f"creating {self.name}/{key}"
        mode = "overwrite" if may_replace else "create"
        request = self._obstore.put_async(self._store, key, pieces, use_multipart=False, mode=mode)
        try:
            await self._bounded(request, what)
        except (self._obstore.exceptions.AlreadyExistsError, FileExistsError):
            return False
        except self._failures as error:
            raise self._worded(what, error) from error
        return True

    async def list(self, prefix: str) -> "list[ObjectInfo]":
        """List all objects whose keys begin with `prefix/`; each page of the list has the time of one request.

        Raises:
            TransferError: it failed, or took too long.
        """
        what = f"listing {self.name}/{prefix}/"
        found: list[ObjectInfo] = []
        try:
            pages = self._obstore.list(self._store, prefix=f"{prefix}/", chunk_size=_LIST_PAGE)
            while True:
                page = await self._bounded(pages.__anext__(), what)
                found += [
                    ObjectInfo(row["path"], row["size"], row["last_modified"].timestamp()) for row in page
                ]
        except StopAsyncIteration:
            return found
        except FileNotFoundError as error:
            if _NO_BUCKET.search(str(error)):
                raise TransferRefused(f"{what}: {_text(error)}") from error
            return []  # a directory without anything
        except self._failures as error:
            raise self._worded(what, error) from error

    async def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; one that is not there any more is no error.

        Raises:
            TransferError: it failed, or took too long; some may have been deleted.
        """
        what = f"deleting {len(keys)} objects of {self.name}"
        try:
            await self._bounded(self._obstore.delete_async(self._store, list(keys)), what)
        except FileNotFoundError as error:
            if _NO_BUCKET.search(str(error)):
                raise TransferRefused(f"{what}: {_text(error)}") from error
        except self._failures as error:
            raise self._worded(what, error) from error

    async def _bounded(
        self, request: "asyncio.Future[Any]", what: str, *, sees_it_through: bool = False
    ) -> Any:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._timeout_s
        cancelled: asyncio.CancelledError | None = None
        while not request.done() and (left_s := deadline_s - loop.time()) > 0:
            try:
                await asyncio.wait([request], timeout=left_s)
            except asyncio.CancelledError as error:
                cancelled = error
                if not sees_it_through:
                    break
        if not request.done():
            request.cancel()
        elif cancelled is None:
            return request.result()
        if cancelled is not None:
            if request.done() and not request.cancelled():
                request.exception()  # it was seen: the cancellation says more
            raise cancelled
        raise TransferError(f"{what}: no answer within {self._timeout_s:g} s (request_timeout_s)")

    def _worded(self, what: str, error: Exception) -> TransferError:
        refusals = (
            self._obstore.exceptions.PermissionDeniedError,
            self._obstore.exceptions.UnauthenticatedError,
            PermissionError,
            FileNotFoundError,
        )
        kind = TransferRefused if isinstance(error, refusals) else TransferError
        return kind(f"{what}: {_text(error)}")


def _settings(
    url: str, options: Mapping[str, str], request_timeout_s: float, retries: int
) -> dict[str, object]:
    if url.startswith("memory:"):
        return {}
    if url.startswith("file:"):
        return {"mkdir": True}
    limit = timedelta(seconds=request_timeout_s)
    endpoint = options.get("endpoint", "")
    says_so = options.get("allow_http", os.environ.get("AWS_ALLOW_HTTP", "")).strip().lower()
    return {
        "config": {key: value for key, value in options.items() if key != "allow_http"},
        "client_options": {
            "timeout": limit,
            "connect_timeout": min(limit, timedelta(seconds=_CONNECT_S)),
            "allow_http": endpoint.startswith("http://") or says_so in _YES,
        },
        "retry_config": {"max_retries": retries, "retry_timeout": limit, "backoff": _BACKOFF},
    }


def _text(error: Exception) -> str:
    """Return the first part of obstore's message, without the debug dump after it."""
    text = " ".join(str(error).partition("\n\nDebug source")[0].split())
    return text if len(text) <= _TEXT_MAX else f"{text[:_TEXT_MAX]}..."
