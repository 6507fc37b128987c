"""Errors with an HTTP status and code of their own, and the API's JSON for any error."""

from http import HTTPStatus
from typing import ClassVar

import msgspec

from penstock.core.errors import ErrorInfo, PenstockError, RequestError, from_info


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

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param, http_status=self.status)


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
