"""The error tree. Every error text says what happened, with values, what was expected, and the fix.

PenstockError (code, http_status)
  ConfigError             a flag, file or field is wrong; the command exits with 2
    WrongServerError      a running server is not what the deployment needs; others may be
  RequestError            the caller's fault: 400, 404, 413
  Overloaded              429 or 503, with retry_after_s
    Backlogged            a worker has yet to read what was sent to it; the router waits
  DeadlineExceeded        504
  Unavailable             503; the request may be tried elsewhere
    WorkerLost            the worker's process or connection is gone
    StepFailed            the engine could not compute a step; this request was in the batch
    PinExpired            the KV blocks pinned for a reader were released before it had read them
    TransferError         bytes did not arrive
      PeerLost            the other agent's process or connection is gone
      TransferRefused     access was not granted, the region is gone, or a range ends outside of it: a retry does not help
      TransferCancelled   `cancel` was called
      MemoryInUse         memory was deregistered, but a peer that does not answer may still use it
      ChecksumMismatch    the bytes that arrived differ from those sent
  Parked                  503: the client reads slowly; the worker sends what it has buffered, then the router chooses again
  StaleRoute              503: requests of other routers reached the worker first; the router chooses again
  EngineError             500: the engine failed on this request
  ProtocolError           502: a peer broke the protocol or speaks another version
"""

from collections.abc import Callable
from typing import ClassVar

from penstock.core.wire import Wire


class ErrorInfo(Wire, frozen=True):
    """An error on the wire. `param` names the request field that is wrong."""

    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None
    http_status: int | None = None


class PenstockError(Exception):
    code: ClassVar[str] = "internal_error"
    http_status: int = 500

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def to_info(self) -> ErrorInfo:
        return ErrorInfo(
            code=self.code,
            message=self.message,
            param=self.param,
            retry_after_s=self.retry_after_s,
            http_status=self.http_status,
        )


class ConfigError(PenstockError):
    code = "config_error"


class WrongServerError(ConfigError):
    pass


class RequestError(PenstockError):
    code = "invalid_request_error"
    http_status = 400

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        param: str | None = None,
        http_status: int = 400,
        retry_after_s: float | None = None,
    ) -> None:
        """Say what is wrong.

        Args:
            message: what was given and what was expected.
            field: the wrong field of the request, which the message then begins with.
            param: the field that clients are told apart from the message; None: `field`.
            http_status: of the answer.
            retry_after_s: seconds after which the client may try again.
        """
        super().__init__(
            message if field is None else f"{field}: {message}",
            param=field if param is None else param,
            retry_after_s=retry_after_s,
        )
        self.http_status = http_status
        self.field = field or _field_of(message, param)

    def rename(self, name: Callable[[str], str]) -> None:
        """Call the wrong field by the name that `name` gives for ours."""
        if self.param is None:
            return
        self.param = name(self.param)
        if self.field is not None:
            ours, self.field = self.field, name(self.field)
            self.message = self.field + self.message[len(ours) :]


def _field_of(message: str, param: str | None) -> str | None:
    """Give the field that a message begins with, `param` or one within it; None where it begins otherwise."""
    head = message.partition(": ")[0]
    is_field = param is not None and (head == param or head.startswith((f"{param}.", f"{param}[")))
    return head if is_field else None


class Overloaded(PenstockError):  # noqa: N818 - a state of the server
    code = "overloaded"
    http_status = 503


class Backlogged(Overloaded):
    """The write buffer to a worker is full; `tell` has a callback called once it has room, or its connection has ended. Never on a wire."""

    def __init__(self, message: str, tell: Callable[[Callable[[], None]], None]) -> None:
        super().__init__(message)
        self.tell = tell


class DeadlineExceeded(PenstockError):  # noqa: N818
    code = "deadline_exceeded"
    http_status = 504


class Unavailable(PenstockError):  # noqa: N818
    code = "unavailable"
    http_status = 503


class WorkerLost(Unavailable):
    code = "worker_lost"


class StepFailed(Unavailable):
    code = "step_failed"


class PinExpired(Unavailable):
    code = "pin_expired"


class TransferError(Unavailable):
    code = "transfer_error"


class PeerLost(TransferError):  # noqa: N818
    code = "peer_lost"


class TransferRefused(TransferError):  # noqa: N818
    code = "transfer_refused"


class TransferCancelled(TransferError):  # noqa: N818
    code = "transfer_cancelled"


class MemoryInUse(TransferError):  # noqa: N818
    code = "memory_in_use"


class ChecksumMismatch(TransferError):  # noqa: N818
    code = "checksum_mismatch"


class StaleRoute(PenstockError):  # noqa: N818
    code = "stale_route"
    http_status = 503


class Parked(PenstockError):  # noqa: N818 - a state of a request
    code = "parked"
    http_status = 503


class EngineError(PenstockError):
    code = "engine_error"


class ProtocolError(PenstockError):
    code = "protocol_error"
    http_status = 502


_BY_CODE: dict[str, type[PenstockError]] = {
    kind.code: kind
    for kind in (
        ConfigError, RequestError, Overloaded, DeadlineExceeded, Unavailable,
        WorkerLost, StepFailed, PinExpired, TransferError, PeerLost, TransferRefused, TransferCancelled, ChecksumMismatch,
        Parked, StaleRoute, EngineError, ProtocolError,
    )
}  # fmt: skip


def from_info(info: ErrorInfo) -> PenstockError:
    """Rebuild the exception that a peer reported; an unknown code becomes a plain PenstockError."""
    error = _BY_CODE.get(info.code, PenstockError)(
        info.message, param=info.param, retry_after_s=info.retry_after_s
    )
    if info.http_status is not None:
        error.http_status = info.http_status
    return error
