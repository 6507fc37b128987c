"""Files and batches of one tenant, on disk. The functions of this module block: the event loop calls them in threads.

files/ID.json, files/ID.data      a file; it exists once it has its .json
batches/ID.json                   a batch that has not ended
ended/ID.json                     a batch that has ended, so that nobody looks through these for work
batches/ID.lock                   locked by the process that runs it
batches/ID.cancel                 a client wants it cancelled
"""

import codecs
import fcntl
import hashlib
import os
import re
import secrets
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

import msgspec

from penstock.core.clock import wall_time_s
from penstock.core.errors import RequestError
from penstock.core.files import write_whole
from penstock.core.log import get_logger
from penstock.frontend.apis.bodies import StrictBody
from penstock.frontend.config import BatchesConfig

Item = TypeVar("Item")


class BatchStatus(StrEnum):
    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


ENDED = frozenset({BatchStatus.COMPLETED, BatchStatus.FAILED, BatchStatus.EXPIRED, BatchStatus.CANCELLED})


class FileObject(msgspec.Struct, kw_only=True):
    """A stored file; times are seconds since 1970."""

    id: str
    object: str = "file"
    bytes: int
    created_at: int
    expires_at: int | None = None
    filename: str
    purpose: str
    status: str = "processed"


class BatchError(msgspec.Struct, kw_only=True):
    """Why a batch was not run; `line` counts from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[BatchError]


class RequestCounts(msgspec.Struct, kw_only=True):
    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchObject(msgspec.Struct, kw_only=True):
    """A batch as clients see it."""

    id: str
    object: str = "batch"
    endpoint: str
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str
    status: BatchStatus = BatchStatus.VALIDATING
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    metadata: dict[str, str] | None = None


class BatchRecord(msgspec.Struct, kw_only=True):
    """A batch as it is kept.

    Attributes:
        cache_salt: of its tenant.
        output_id: of the file that gets the answers, from the batch's beginning on; likewise `errors_id`.
    """

    batch: BatchObject
    tenant: str
    cache_salt: str
    output_id: str
    errors_id: str


class BatchLine(msgspec.Struct, kw_only=True):
    """One line of a batch's input."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class BatchRequest(StrictBody, kw_only=True):
    """Body of `POST /v1/batches`."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    strict: bool | None = None
    output_expires_after: Any = None  # accepted, no effect: all files are kept for `files_kept_s`


class ObjectList(msgspec.Struct, Generic[Item], kw_only=True):
    object: str = "list"
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Deleted(msgspec.Struct, kw_only=True):
    id: str
    object: str = "file"
    deleted: bool = True


ERRORS_MAX = 100
CUSTOM_ID_CHARACTERS_MAX = 512
_decode = msgspec.json.Decoder(BatchLine).decode


class _CustomId(msgspec.Struct):
    custom_id: str


_decode_id = msgspec.json.Decoder(_CustomId).decode


def check_input(
    path: Path, endpoint: str, *, requests_max: int, line_bytes_max: int
) -> tuple[int, list[BatchError]]:
    """Count the requests of an input, and list what is wrong with it, at most `ERRORS_MAX` problems."""
    errors: list[BatchError] = []
    seen: set[bytes] = set()
    total = 0
    with path.open("rb") as file:
        for number, line in _numbered(file, line_bytes_max):
            total += 1
            problem = _problem(line, endpoint, seen, line_bytes_max)
            if total > requests_max:
                text = f"more than {requests_max} requests, requests_max; split the file"
                problem = ("too_many_requests", text, None)
            if problem is not None:
                code, message, param = problem
                errors.append(BatchError(code=code, message=message, line=number, param=param))
                if len(errors) >= ERRORS_MAX or total > requests_max:
                    return total, errors
    if not total:
        errors.append(BatchError(code="empty_file", message="the input file has no requests"))
    return total, errors


def read_lines(path: Path, done: AbstractSet[bytes], line_bytes_max: int) -> Iterator[BatchLine]:
    """Give the requests of a checked input whose custom ids are not `done` (see `digest`)."""
    with path.open("rb") as file:
        for _, line in _numbered(file, line_bytes_max):
            request = _decode(line)
            if digest(request.custom_id) not in done:
                yield request


def read_done(path: Path) -> set[bytes]:
    """Give the digests of the custom ids in an output; a last line that was not written whole is cut off."""
    done: set[bytes] = set()
    if not path.exists():
        return done
    whole_bytes = 0
    with path.open("r+b") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            done.add(digest(_decode_id(line).custom_id))
            whole_bytes += len(line)
        file.truncate(whole_bytes)
    return done


def digest(custom_id: str) -> bytes:
    """Shorten an id, of which a batch may have many, to 16 bytes."""
    return hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _numbered(file: object, line_bytes_max: int) -> Iterator[tuple[int, bytes]]:
    """Give the lines with their numbers, empty ones and a byte order mark left out, each cut after `line_bytes_max` + 1 bytes."""
    number, is_rest = 0, False
    while line := file.readline(line_bytes_max + 2):  # type: ignore[attr-defined]
        continues, is_rest = is_rest, not line.endswith(b"\n")
        if continues:
            continue
        number += 1
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)  # of editors on Windows
        if line.strip():
            yield number, line.rstrip(b"\r\n")


def _problem(
    line: bytes, endpoint: str, seen: set[bytes], line_bytes_max: int
) -> tuple[str, str, str | None] | None:
    """Give (code, text, field) of what is wrong with a line; None if nothing is."""
    if len(line) > line_bytes_max:
        text = f"the line is longer than {line_bytes_max} bytes, frontend.body_bytes_max"
        return "line_too_long", text, None
    try:
        request = _decode(line)
    except (ValueError, RecursionError) as error:
        return "invalid_json_line", f"the line is no request: {error}", None
    custom_id = request.custom_id
    key = digest(custom_id)
    problem: tuple[str, str, str | None] | None = None
    if not 1 <= len(custom_id) <= CUSTOM_ID_CHARACTERS_MAX:
        text = f"custom_id: must have 1 to {CUSTOM_ID_CHARACTERS_MAX} characters, got {len(custom_id)}"
        problem = "invalid_custom_id", text, "custom_id"
    elif key in seen:
        problem = "duplicate_custom_id", f"custom_id: {custom_id[:40]!r} is not unique", "custom_id"
    elif request.method != "POST":
        problem = "invalid_method", f"method: must be 'POST', got {request.method[:40]!r}", "method"
    elif request.url != endpoint:
        text = f"url: must be {endpoint!r}, the batch's endpoint, got {request.url[:40]!r}"
        problem = "invalid_url", text, "url"
    elif not bytes(request.body).lstrip().startswith(b"{"):
        problem = "invalid_body", "body: must be an object", "body"
    seen.add(key)
    return problem


_ID = re.compile(r"(file-|batch_)[0-9a-f]{24}")
_UPLOAD = ".upload-"
_UPLOAD_KEPT_S = 3600
_OWNER_ONLY = 0o700
LIST_MAX = 10_000
FILES_MAX = 1000
"""Files of one tenant."""
BATCHES_MAX = 64
"""Batches of one tenant that have not ended."""
_log = get_logger()

Kept = TypeVar("Kept", FileObject, BatchRecord)
Listed = TypeVar("Listed", FileObject, BatchObject)


class BatchStore:
    """What one tenant has. Several processes may use it at once."""

    def __init__(self, config: BatchesConfig, folder: Path) -> None:
        self.config = config
        self.name = folder.name
        """Of the tenant's folder."""
        self._files = folder / "files"
        self._batches = folder / "batches"
        self._ended = folder / "ended"

    @classmethod
    def of(cls, config: BatchesConfig, tenant: str) -> "BatchStore":
        """Open a tenant's store; its folders are made with its first file."""
        name = hashlib.blake2b(tenant.encode(), digest_size=16).hexdigest()
        assert config.directory is not None, "checked by callers"
        return cls(config, Path(config.directory) / f"tenant-{name}")

    @classmethod
    def all(cls, config: BatchesConfig) -> Iterator["BatchStore"]:
        """Open the stores of all tenants."""
        assert config.directory is not None, "checked by callers"
        for folder in sorted(Path(config.directory).glob("tenant-*")):
            yield cls(config, folder)

    # ---- files ----------------------------------------------------------------------------------------

    def begin_upload(self) -> tuple[Path, BinaryIO]:
        """Open a new file for an upload; `end_upload` keeps it.

        Raises:
            RequestError: the tenant has as many files, or bytes, as it may have (413).
            OSError: the directory cannot be written.
        """
        config = self.config
        files = list(self._files.glob("*.json"))
        if len(files) >= FILES_MAX:
            raise RequestError(
                f"there are {len(files)} files already, and a tenant may have {FILES_MAX}; delete some",
                field="file",
                http_status=413,
            )
        used = sum(_size_bytes(path) for path in self._files.glob("*.data"))
        if used >= config.tenant_bytes_max:
            raise RequestError(
                f"{used} bytes are stored already, and tenant_bytes_max is {config.tenant_bytes_max}; delete some files",
                field="file",
                http_status=413,
            )
        for folder in (self._files, self._batches, self._ended):
            folder.mkdir(_OWNER_ONLY, parents=True, exist_ok=True)
        path = self._files / f"{_UPLOAD}{secrets.token_hex(12)}"
        return path, path.open("xb")

    def end_upload(self, path: Path, *, filename: str, purpose: str) -> FileObject:
        """Keep what was uploaded to `path` as a file."""
        file_id = new_id("file-")
        path.replace(self.data(file_id))
        return self.keep(file_id, filename=filename, purpose=purpose)

    def keep(self, file_id: str, *, filename: str, purpose: str) -> FileObject:
        """Make a file of the data that is there for it."""
        now = int(wall_time_s())
        stored = FileObject(
            id=file_id,
            bytes=self.data(file_id).stat().st_size,
            created_at=now,
            expires_at=now + int(self.config.files_kept_s),
            filename=filename,
            purpose=purpose,
        )
        write_whole(self._files / f"{file_id}.json", msgspec.json.encode(stored))
        return stored

    def data(self, file_id: str) -> Path:
        """Give where the bytes of a file are, or are to be."""
        return self._files / f"{file_id}.data"

    def file(self, file_id: str) -> FileObject:
        """Raises: RequestError: there is no such file (404)."""
        return _read(self._files, file_id, FileObject, "file_id")

    def files(self, purpose: str | None) -> list[FileObject]:
        """List the files of a purpose, the newest first."""
        files = [stored for stored in _all(self._files, FileObject) if purpose in {None, stored.purpose}]
        return sorted(files, key=lambda stored: (stored.created_at, stored.id), reverse=True)

    def delete_file(self, file_id: str) -> None:
        """Raises: RequestError: there is no such file (404), or a batch that has not ended reads it (409)."""
        self.file(file_id)
        for record in self.unended():
            if record.batch.input_file_id == file_id:
                raise RequestError(
                    f"{file_id} is the input of {record.batch.id}, which is {record.batch.status}; cancel it first",
                    field="file_id",
                    http_status=409,
                )
        self._remove_file(file_id)

    # ---- batches --------------------------------------------------------------------------------------

    def add_batch(self, record: BatchRecord) -> None:
        """Keep a new batch.

        Raises:
            RequestError: the tenant has as many batches under way as it may have (429).
        """
        under_way = sum(1 for _ in self.unended())
        if under_way >= BATCHES_MAX:
            raise RequestError(
                f"{under_way} batches have not ended, and a tenant may have {BATCHES_MAX}; wait until one ends",
                http_status=429,
                retry_after_s=60.0,
            )
        self.put(record)

    def put(self, record: BatchRecord) -> None:
        """Keep what has become of a batch."""
        batch, name = record.batch, f"{record.batch.id}.json"
        has_ended = batch.status in ENDED
        write_whole((self._ended if has_ended else self._batches) / name, msgspec.json.encode(record))
        if has_ended:
            for suffix in ("json", "cancel"):
                (self._batches / f"{batch.id}.{suffix}").unlink(missing_ok=True)

    def record(self, batch_id: str) -> BatchRecord:
        """Raises: RequestError: there is no such batch (404)."""
        under_way = _find(self._batches, batch_id, BatchRecord)
        return under_way or _read(self._ended, batch_id, BatchRecord, "batch_id")

    def batch(self, batch_id: str) -> BatchObject:
        """Give a batch as clients see it.

        Raises:
            RequestError: there is no such batch (404).
        """
        return self._shown(self.record(batch_id).batch)

    def batches(self) -> list[BatchObject]:
        """List all batches, the newest first."""
        batches = {
            record.batch.id: self._shown(record.batch)
            for folder in (self._ended, self._batches)
            for record in _all(folder, BatchRecord)
        }
        return sorted(batches.values(), key=lambda batch: (batch.created_at, batch.id), reverse=True)

    def unended(self) -> Iterator[BatchRecord]:
        """Give the batches that have not ended."""
        return _all(self._batches, BatchRecord)

    def unended_ids(self) -> list[str]:
        """Give the ids of batches that have not ended, the oldest first, unreadable records included."""
        return sorted(path.stem for path in self._batches.glob("*.json") if _ID.fullmatch(path.stem))

    def ask_to_cancel(self, batch_id: str) -> BatchObject:
        """Have the process that runs a batch cancel it.

        Raises:
            RequestError: there is no such batch (404), or it has ended (409).
        """
        status = self.record(batch_id).batch.status
        if status in ENDED:
            raise RequestError(
                f"{batch_id} is {status}; only a batch that has not ended can be cancelled",
                field="batch_id",
                http_status=409,
            )
        self._cancel(batch_id).touch()
        return self.batch(batch_id)

    def is_to_cancel(self, batch_id: str) -> bool:
        return self._cancel(batch_id).exists()

    def try_lock(self, batch_id: str) -> int | None:
        """Take the right to run a batch; None while another process has it. Closing the descriptor gives it up, as death does."""
        lock = os.open(self._batches / f"{batch_id}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            return None
        return lock

    def clean(self, now: float) -> None:
        """Remove files and ended batches past their time by this date, the oldest ended ones of too many, and uploads that were broken off."""
        for stored in _all(self._files, FileObject):
            if stored.expires_at is not None and stored.expires_at < now and not self._is_input(stored.id):
                self._remove_file(stored.id)
        for path in self._files.glob(f"{_UPLOAD}*"):
            if path.stat().st_mtime < now - _UPLOAD_KEPT_S:
                path.unlink(missing_ok=True)
        ended = sorted(
            (record.batch.created_at, record.batch.id) for record in _all(self._ended, BatchRecord)
        )
        for index, (created_at, batch_id) in enumerate(ended):
            if created_at + self.config.files_kept_s < now or index < len(ended) - LIST_MAX:
                (self._ended / f"{batch_id}.json").unlink(missing_ok=True)
                for suffix in ("lock", "cancel"):
                    (self._batches / f"{batch_id}.{suffix}").unlink(missing_ok=True)

    def _is_input(self, file_id: str) -> bool:
        return any(record.batch.input_file_id == file_id for record in self.unended())

    def _remove_file(self, file_id: str) -> None:
        (self._files / f"{file_id}.json").unlink(missing_ok=True)
        self.data(file_id).unlink(missing_ok=True)

    def _cancel(self, batch_id: str) -> Path:
        return self._batches / f"{batch_id}.cancel"

    def _shown(self, batch: BatchObject) -> BatchObject:
        if batch.status not in ENDED and self.is_to_cancel(batch.id):
            batch.status = BatchStatus.CANCELLING
            batch.cancelling_at = int(self._cancel(batch.id).stat().st_mtime)
        return batch


def new_id(prefix: str) -> str:
    """Make an id that nobody can guess."""
    return f"{prefix}{secrets.token_hex(12)}"


def new_batch_id(now_s: float) -> str:
    """Make an id that nobody can guess, and that comes after earlier ones."""
    return f"batch_{int(now_s * 1e3):012x}{secrets.token_hex(6)}"


def page(items: list[Listed], after: str | None, limit: int) -> ObjectList[Listed]:
    """Give the page of a list that begins after an id.

    Raises:
        RequestError: the list has no such id.
    """
    ids = [item.id for item in items]
    if after is not None and after not in ids:
        raise RequestError(f"{after[:40]!r} is not in the list; leave it out", field="after")
    start = 0 if after is None else ids.index(after) + 1
    shown = items[start : start + limit]
    return ObjectList(
        data=shown,
        first_id=ids[start] if shown else None,
        last_id=ids[start + len(shown) - 1] if shown else None,
        has_more=start + len(shown) < len(items),
    )


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0  # removed meanwhile


def _find(folder: Path, item_id: str, kind: type[Kept]) -> Kept | None:
    if not _ID.fullmatch(item_id):
        return None
    try:
        return msgspec.json.decode((folder / f"{item_id}.json").read_bytes(), type=kind)
    except FileNotFoundError:
        return None


def _read(folder: Path, item_id: str, kind: type[Kept], param: str) -> Kept:
    if (found := _find(folder, item_id, kind)) is not None:
        return found
    raise RequestError(f"{item_id[:40]!r} does not exist", field=param, http_status=404)


def _all(folder: Path, kind: type[Kept]) -> Iterator[Kept]:
    for path in folder.glob("*.json"):
        if path.name.startswith("."):
            continue  # being written
        try:
            yield msgspec.json.decode(path.read_bytes(), type=kind)
        except FileNotFoundError:
            continue  # removed meanwhile
        except ValueError as error:
            _log.error("batches_file_not_read", file=str(path), error=str(error))
