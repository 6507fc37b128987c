"""Receives a file of a form straight to disk, in bounded memory."""

import asyncio
from pathlib import Path
from typing import BinaryIO

from aiohttp import BodyPartReader, web
from aiohttp.http import HttpProcessingError

from penstock.core.errors import RequestError
from penstock.frontend.batches.objects import FileObject
from penstock.frontend.batches.store import BatchStore
from penstock.frontend.errors import BodySizeError

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
            raise RequestError("file: required, but missing", param="file")
        if purpose not in PURPOSES:
            problem = "required, but missing" if purpose is None else f"must be 'batch', got {purpose[:40]!r}"
            raise RequestError(f"purpose: {problem}", param="purpose")
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
                f"file: is larger than {bytes_max} bytes; split it, or raise frontend.batches.file_bytes_max",
                param="file",
            )
        await asyncio.to_thread(file.write, chunk)
