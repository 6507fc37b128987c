"""Runs one request of a batch as the API would, without HTTP."""

import asyncio
from http import HTTPStatus

import msgspec

from penstock.core.errors import PenstockError, RequestError
from penstock.core.log import get_logger
from penstock.frontend.batches.gaps import Gaps
from penstock.frontend.batches.objects import BatchLine
from penstock.frontend.batches.store import new_id
from penstock.frontend.errors import error_answer
from penstock.frontend.frontend import Frontend
from penstock.frontend.limits.headers import RequestOptions
from penstock.frontend.openai.answers import encode
from penstock.frontend.requests.dialects import CHAT, COMPLETIONS
from penstock.frontend.responses.events import RESPONSES

EMBEDDINGS = "/v1/embeddings"
_DIALECTS = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETIONS, "/v1/responses": RESPONSES}
ENDPOINTS = (*_DIALECTS, EMBEDDINGS)
_LATER = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE})
_TRIES_MAX = 12
_PAUSE_S = (0.5, 60.0)
_log = get_logger()


class Response(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class Failure(msgspec.Struct):
    code: str
    message: str


class OutputLine(msgspec.Struct, kw_only=True):
    """A line of a batch's output, or of its errors."""

    id: str
    custom_id: str
    response: Response | None
    error: Failure | None = None


async def answer_line(
    frontend: Frontend, gaps: Gaps, line: BatchLine, options: RequestOptions
) -> tuple[bool, bytes]:
    """Answer a request; a server that is busy, or has lost its worker, is asked again up to 12 times, within 8 minutes.

    Returns:
        whether it was answered, and the line to write.
    """
    name = ""
    for tried in range(1, _TRIES_MAX + 1):
        try:
            name, body = await _answer(frontend, gaps, line, options)
        except PenstockError as error:
            if error.http_status in _LATER and tried < _TRIES_MAX:
                low, high = _PAUSE_S
                await asyncio.sleep(min(max(error.retry_after_s or low, low * 2 ** (tried - 1)), high))
                continue
            return False, _line(line, error.http_status, name, encode(error_answer(error)))
        except Exception:  # noqa: BLE001 - one request must not end its batch
            _log.exception("batch_request_failed", custom_id=line.custom_id)
            failure = PenstockError("the server failed on this request; its log says more")
            return False, _line(line, failure.http_status, name, encode(error_answer(failure)))
        return True, _line(line, HTTPStatus.OK, name, body)
    raise AssertionError("the last try returns")


def expired_line(line: BatchLine) -> bytes:
    """Give the error line of a request that had not run by the end of the batch's window."""
    failure = Failure("batch_expired", "the batch's completion window ended before this request was answered")
    return (
        encode(OutputLine(id=new_id("batch_req_"), custom_id=line.custom_id, response=None, error=failure))
        + b"\n"
    )


async def _answer(
    frontend: Frontend, gaps: Gaps, line: BatchLine, options: RequestOptions
) -> tuple[str, bytes]:
    """Give the id and the body of the answer."""
    body = [bytes(line.body)]
    with frontend.arrive() as slot:
        frontend.admit(slot)
        gaps.admitted += 1
        try:
            with slot.limit():
                if line.url == EMBEDDINGS:
                    embeddings = await frontend.embed(body, slot, options)
                    await embeddings.completion.run()
                    return embeddings.prepared.id, await embeddings.completion.body()
                pending = await frontend.generate(body, slot, options, _DIALECTS[line.url])
                if pending.stream:
                    raise RequestError("stream: a batch does not stream; leave it out", param="stream")
                answer = pending.whole_answer()
                await pending.completion.run(answer.take)
                return pending.prepared.id, await pending.body(answer)
        finally:
            gaps.admitted -= 1


def _line(line: BatchLine, status: int, request_id: str, body: bytes) -> bytes:
    response = Response(status, request_id, msgspec.Raw(body))
    return encode(OutputLine(id=new_id("batch_req_"), custom_id=line.custom_id, response=response)) + b"\n"
