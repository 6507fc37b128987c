"""Errors with an HTTP status and code of their own, and the API's JSON for any error."""

from http import HTTPStatus
from types import TracebackType
from typing import ClassVar, Self

import msgspec

from penstock.core.errors import ErrorInfo, PenstockError, RequestError, from_info
from penstock.core.wire import Wire


class ErrorBody(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct):
    error: ErrorBody


MESSAGE_CHARACTERS_MAX = 1500


def shown_message(error: PenstockError) -> str:
    """Give an error's message, shortened in its middle if a client's own value makes it long."""
    text = error.message
    if len(text) <= MESSAGE_CHARACTERS_MAX:
        return text
    half = MESSAGE_CHARACTERS_MAX // 2
    return f"{text[:half]}...{text[-half:]}"


def error_answer(error: PenstockError) -> ErrorAnswer:
    """Convert an error to the API's JSON."""
    if error.http_status == HTTPStatus.TOO_MANY_REQUESTS:
        kind = "rate_limit_error"
    else:
        kind = "invalid_request_error" if 400 <= error.http_status < 500 else "server_error"
    code = None if error.code == RequestError.code else error.code  # the type already says this
    return ErrorAnswer(ErrorBody(message=shown_message(error), type=kind, param=error.param, code=code))


class _RefusalError(RequestError):
    status: ClassVar[int] = 400

    def __init__(self, message: str, *, field: str | None = None, param: str | None = None) -> None:
        super().__init__(message, field=field, param=param, http_status=self.status)


class ContextLengthError(_RefusalError):
    code = "context_length_exceeded"


class ApiKeyError(_RefusalError):
    code = "invalid_api_key"
    status = 401


class AdminTokenError(_RefusalError):
    code = "invalid_admin_token"
    status = 401


class ForbiddenError(_RefusalError):
    code = "forbidden"
    status = 403


class UnknownModelError(_RefusalError):
    code = "model_not_found"
    status = 404


class UnknownPathError(_RefusalError):
    code = "path_not_found"
    status = 404


class MethodError(_RefusalError):
    code = "method_not_allowed"
    status = 405


class ReceiveTimeoutError(_RefusalError):
    code = "receive_timeout"
    status = 408


class BodySizeError(_RefusalError):
    code = "request_too_large"
    status = 413


class BodyEncodingError(_RefusalError):
    code = "unsupported_encoding"
    status = 415


class RateLimitError(PenstockError):
    """A tenant is at one of its limits; `limit` names it."""

    code = "rate_limit_exceeded"
    http_status = 429

    def __init__(self, message: str, *, limit: str, retry_after_s: float) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.limit = limit


_BY_CODE: dict[str, type[_RefusalError]] = {
    kind.code: kind for kind in (ContextLengthError, UnknownModelError, BodySizeError)
}


def refusal_of(info: ErrorInfo) -> PenstockError:
    """Rebuild an error that an encoder process reported."""
    kind = _BY_CODE.get(info.code)
    return from_info(info) if kind is None else kind(info.message, param=info.param)


_CONTENT = ".content"


class FieldOrigin(Wire, frozen=True):
    """Where a translated message stands in the client's body. `has_parts`: its content has the same parts as there."""

    field: str
    content: str
    has_parts: bool = False


class ClientFields(Wire, frozen=True):
    """A context that renames fields in a `RequestError` raised inside it to the client's names.

    Attributes:
        names: client's field name by our field name; a path after the name is kept.
        messages: the origin of each message; empty where the client sent `messages` itself.
        tools: the client's name of a tool's `parameters`, where its tools have no `function` object; empty otherwise.
    """

    names: dict[str, str] = msgspec.field(default_factory=dict)
    messages: tuple[FieldOrigin, ...] = ()
    tools: str = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, RequestError):
            error.rename(self.of)

    def of(self, path: str) -> str:
        """Give the client's name for a path of fields."""
        number, _, rest = path.removeprefix("messages[").partition("]")
        if self.messages and number != path and number.isdecimal() and int(number) < len(self.messages):
            origin = self.messages[int(number)]
            if not rest.startswith(_CONTENT):
                return origin.field + rest if origin.has_parts else origin.field
            return origin.content + (rest[len(_CONTENT) :] if origin.has_parts else "")
        if self.tools and path.startswith("tools["):
            return path.replace(".function.parameters", f".{self.tools}").replace(".function", "")
        ours = path
        while ours not in self.names:
            ours = ours[: max(ours.rfind("."), ours.rfind("["), 0)]
            if not ours:
                return path
        return self.names[ours] + path[len(ours) :]

    def after(self, instructions: int, history: int) -> "ClientFields":
        """Give the names for a body in which `history` stored messages follow the first `instructions` messages."""
        head, said = self.messages[:instructions], self.messages[instructions:]
        stored = FieldOrigin(field="previous_response_id", content="previous_response_id")
        return ClientFields(
            names=self.names, messages=(*head, *(stored for _ in range(history)), *said), tools=self.tools
        )


SAME = ClientFields()
"""For bodies whose field names are our own."""
