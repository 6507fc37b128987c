"""`/v1/files` and `/v1/batches`, as OpenAI has them; a file is received straight to disk, in bounded memory."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from functools import wraps
from pathlib import Path
from typing import BinaryIO

import msgspec
from aiohttp import BodyPartReader, web
from aiohttp.http import HttpProcessingError

from penstock.core.clock import wall_time_s
from penstock.core.errors import Overloaded, RequestError
from penstock.core.json_text import encode_json
from penstock.core.log import cause, get_logger
from penstock.frontend.apis.decoding import parse_body
from penstock.frontend.batch_run import ENDPOINTS
from penstock.frontend.batch_store import (
    LIST_MAX,
    BatchObject,
    BatchRecord,
    BatchRequest,
    BatchStore,
    Deleted,
    FileObject,
    new_batch_id,
    new_id,
    page,
)
from penstock.frontend.errors import BodySizeError, ClientFields
from penstock.frontend.frontend import Frontend
from penstock.frontend.http.replies import json_response
from penstock.frontend.limits.tenants import Tenant

PURPOSES = ("batch",)
_FIELD_BYTES_MAX = 4096
_PARTS_MAX = 8
_CHUNK_BYTES = 64 << 10


async def receive_file(request: web.Request, store: BatchStore) -> FileObject:
    """Keep the `file` of a multipart form as a file of its `purpose`.

    Raises:
        RequestError: the form is malformed or lacks a field; or the tenant may have no more files (413).
        BodySizeError: the file is too large.
    """
    if request.content_type != "multipart/form-data":
        raise RequestError(
            f"Content-Type: must be multipart/form-data with the fields file and purpose, got {request.content_type}",
            http_status=415,
        )
    path, file = await asyncio.to_thread(store.begin_upload)
    try:
        try:
            filename, purpose = await _receive(request, file, store.config.file_bytes_max)
        except (ValueError, AssertionError, HttpProcessingError) as error:
            problem = " ".join(str(error).split())[:200]
            raise RequestError(f"the body is no valid form: {problem}") from error
        finally:
            file.close()
        if filename is None:
            raise RequestError("required, but missing", field="file")
        if purpose not in PURPOSES:
            problem = "required, but missing" if purpose is None else f"must be 'batch', got {purpose[:40]!r}"
            raise RequestError(problem, field="purpose")
        return await asyncio.to_thread(store.end_upload, path, filename=filename, purpose=purpose)
    finally:
        await asyncio.to_thread(Path.unlink, path, missing_ok=True)


async def _receive(request: web.Request, file: BinaryIO, bytes_max: int) -> tuple[str | None, str | None]:
    """Write the field `file`; give its name, and the field `purpose`."""
    filename = purpose = None
    form = await request.multipart()
    for _ in range(_PARTS_MAX):
        part = await form.next()
        if part is None:
            break
        if not isinstance(part, BodyPartReader):
            raise RequestError("the form has a form inside; send the fields file and purpose")
        if part.name == "file" and filename is None:
            given = (part.filename or "upload.jsonl")[:256]
            filename = given.encode("utf-8", "replace").decode()  # lone surrogates stand for other bytes
            await _copy(part, file, bytes_max)
            continue
        value = bytearray()
        while chunk := await part.read_chunk(_CHUNK_BYTES):
            value += chunk
            if len(value) > _FIELD_BYTES_MAX:
                raise RequestError(
                    f"{str(part.name)[:40]}: has over {_FIELD_BYTES_MAX} bytes, expected a short text"
                )
        if part.name == "purpose":
            purpose = value.decode("utf-8", "replace")
    return filename, purpose


async def _copy(part: BodyPartReader, file: BinaryIO, bytes_max: int) -> None:
    size_bytes = 0
    while chunk := await part.read_chunk(_CHUNK_BYTES):
        size_bytes += len(chunk)
        if size_bytes > bytes_max:
            raise BodySizeError(
                f"is larger than {bytes_max} bytes; split it, or raise frontend.batches.file_bytes_max",
                field="file",
            )
        await asyncio.to_thread(file.write, chunk)


Handler = Callable[[web.Request, BatchStore], Awaitable[web.StreamResponse]]
_UPLOADS_MAX = 16
_UPLOAD_TIMEOUT_S = 300.0
_DISK_RETRY_AFTER_S = 30.0
_WINDOW = re.compile(r"([1-9][0-9]{0,5})([smhd])")
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_WINDOW_S_MAX = 7 * 86_400
_LIST_LIMIT = 20
_METADATA_MAX = 16
_BATCH_BYTES_MAX = 64 << 10
"""Of a body that describes a batch, which is decoded on the event loop."""
_INPUT_FILE = ClientFields(names={"file_id": "input_file_id"})
_decode = msgspec.json.Decoder(BatchRequest).decode
_log = get_logger()


class BatchRoutes:
    """Handlers of one `Frontend`'s files and batches."""

    def __init__(self, frontend: Frontend, tenant: Callable[[], Tenant]) -> None:
        """Make the handlers; `tenant` gives the tenant of the request being handled."""
        self._frontend = frontend
        self._config = frontend.config.batches
        self._tenant = tenant
        self._uploads = 0

    def routes(self) -> list[web.RouteDef]:
        of = self._of_tenant
        return [
            web.post("/v1/files", of(self._upload)),
            web.get("/v1/files", of(self._list_files)),
            web.get("/v1/files/{id}", of(self._file)),
            web.delete("/v1/files/{id}", of(self._delete_file)),
            web.get("/v1/files/{id}/content", of(self._content)),
            web.post("/v1/batches", of(self._create)),
            web.get("/v1/batches", of(self._list_batches)),
            web.get("/v1/batches/{id}", of(self._batch)),
            web.post("/v1/batches/{id}/cancel", of(self._cancel)),
        ]

    def _of_tenant(self, handler: Handler) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """Give a handler the store of its request's tenant."""

        @wraps(handler)
        async def handle(request: web.Request) -> web.StreamResponse:
            if self._config.directory is None:
                raise RequestError(
                    "this server keeps no files and runs no batches; its operator can set frontend.batches.directory",
                    http_status=404,
                )
            try:
                return await handler(request, BatchStore.of(self._config, self._tenant().name))
            except (ConnectionError, TimeoutError):  # not of the disk
                raise
            except OSError as error:
                _log.error("batches_not_stored", directory=self._config.directory, **cause(error))
                raise Overloaded(
                    f"files and batches cannot be read or written here: {(error.strerror or str(error)).lower()}; try again later,"
                    " or tell who runs this server: frontend.batches.directory",
                    retry_after_s=_DISK_RETRY_AFTER_S,
                ) from error

        return handle

    async def _upload(self, request: web.Request, store: BatchStore) -> web.Response:
        if self._uploads >= _UPLOADS_MAX:
            raise Overloaded(f"{self._uploads} files are being uploaded; try again later", retry_after_s=5.0)
        self._uploads += 1
        try:
            with self._frontend.arrive() as slot:
                slot.timeout_s = _UPLOAD_TIMEOUT_S
                slot.deadline = slot.arrived + slot.timeout_s
                with slot.limit():
                    return json_response(encode_json(await receive_file(request, store)))
        finally:
            self._uploads -= 1

    async def _list_files(self, request: web.Request, store: BatchStore) -> web.Response:
        files = await asyncio.to_thread(store.files, request.query.get("purpose"))
        if _asked(request, "order", ("desc", "asc")) == "asc":
            files.reverse()
        return json_response(encode_json(page(files, request.query.get("after"), _limit(request, LIST_MAX))))

    async def _file(self, request: web.Request, store: BatchStore) -> web.Response:
        return json_response(encode_json(await asyncio.to_thread(store.file, request.match_info["id"])))

    async def _delete_file(self, request: web.Request, store: BatchStore) -> web.Response:
        await asyncio.to_thread(store.delete_file, request.match_info["id"])
        return json_response(encode_json(Deleted(id=request.match_info["id"])))

    async def _content(self, request: web.Request, store: BatchStore) -> web.StreamResponse:
        stored = await asyncio.to_thread(store.file, request.match_info["id"])
        return web.FileResponse(store.data(stored.id), headers={"Content-Type": "application/jsonl"})

    async def _create(self, request: web.Request, store: BatchStore) -> web.Response:
        frontend = self._frontend
        with frontend.arrive() as slot, frontend.budget.hold(slot.end) as received, slot.limit():
            body = b"".join(await frontend.bodies.read(request, received))
        if len(body) > _BATCH_BYTES_MAX:
            raise BodySizeError(
                f"the body has {len(body)} bytes, at most {_BATCH_BYTES_MAX} are allowed here; requests come in a file"
            )
        asked = parse_body(body, BatchRequest, _decode)
        now = int(wall_time_s())
        _check(asked)
        with _INPUT_FILE:
            stored = await asyncio.to_thread(store.file, asked.input_file_id)
        if stored.purpose != "batch":
            raise RequestError(
                f"is a file for {stored.purpose!r}, expected one uploaded for 'batch'",
                field="input_file_id",
            )
        batch = BatchObject(
            id=new_batch_id(wall_time_s()),
            endpoint=asked.endpoint,
            input_file_id=stored.id,
            completion_window=asked.completion_window,
            created_at=now,
            expires_at=now + _window_s(asked.completion_window),
            metadata=asked.metadata,
        )
        tenant = self._tenant()
        record = BatchRecord(
            batch=batch,
            tenant=tenant.name,
            cache_salt=tenant.cache_salt,
            output_id=new_id("file-"),
            errors_id=new_id("file-"),
        )
        await asyncio.to_thread(store.add_batch, record)
        return json_response(encode_json(batch))

    async def _list_batches(self, request: web.Request, store: BatchStore) -> web.Response:
        batches = await asyncio.to_thread(store.batches)
        return json_response(encode_json(page(batches, request.query.get("after"), _limit(request, 100))))

    async def _batch(self, request: web.Request, store: BatchStore) -> web.Response:
        return json_response(encode_json(await asyncio.to_thread(store.batch, request.match_info["id"])))

    async def _cancel(self, request: web.Request, store: BatchStore) -> web.Response:
        return json_response(
            encode_json(await asyncio.to_thread(store.ask_to_cancel, request.match_info["id"]))
        )


def _check(asked: BatchRequest) -> None:
    if asked.endpoint not in ENDPOINTS:
        raise RequestError(
            f"must be one of {', '.join(ENDPOINTS)}, got {asked.endpoint[:40]!r}", field="endpoint"
        )
    if len(asked.metadata or {}) > _METADATA_MAX:
        raise RequestError(
            f"at most {_METADATA_MAX} keys are allowed, got {len(asked.metadata or {})}",
            field="metadata",
        )


def _window_s(text: str) -> int:
    found = _WINDOW.fullmatch(text)
    window_s = 0 if found is None else int(found[1]) * _UNITS_S[found[2]]
    if not 0 < window_s <= _WINDOW_S_MAX:
        raise RequestError(
            f"must be a time of at most 7d, such as '24h', got {text[:40]!r}",
            field="completion_window",
        )
    return window_s


def _limit(request: web.Request, most: int) -> int:
    text = request.query.get("limit", str(min(_LIST_LIMIT, most)))
    if not (text.isascii() and text.isdigit() and len(text) < 7 and 1 <= int(text) <= most):
        raise RequestError(f"must be >= 1 and <= {most}, got {text[:40]!r}", field="limit")
    return int(text)


def _asked(request: web.Request, name: str, values: tuple[str, ...]) -> str:
    text = request.query.get(name, values[0])
    if text not in values:
        raise RequestError(f"must be one of {', '.join(values)}, got {text[:40]!r}", field=name)
    return text
