"""What `/v1/files` and `/v1/batches` show, in OpenAI's shape, and what is kept of a batch."""

from enum import StrEnum
from typing import Any, Generic, TypeVar

import msgspec

from penstock.frontend.openai.bodies import Body

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


class Batch(msgspec.Struct, kw_only=True):
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

    batch: Batch
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


class BatchRequest(Body, kw_only=True):
    """Body of `POST /v1/batches`."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    strict: bool | None = None
    output_expires_after: Any = None  # accepted, no effect: all files are kept for `files_kept_s`


class Listing(msgspec.Struct, Generic[Item], kw_only=True):
    object: str = "list"
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Deleted(msgspec.Struct, kw_only=True):
    id: str
    object: str = "file"
    deleted: bool = True
