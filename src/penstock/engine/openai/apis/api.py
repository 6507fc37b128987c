"""The common part of all servers' APIs: a request body, and an answer read line by line."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, TypeVar

import msgspec

from penstock.core.errors import PenstockError, RequestError, StepFailed
from penstock.core.types.instances import CLIENT_SALT
from penstock.core.types.requests import FinishReason, Request, SamplingParams, TokenLogprob

T = TypeVar("T")
_DATA = b"data:"
_DONE = b"[DONE]"
_SEED_MAX = (1 << 63) - 1
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for a server's bytes: no JSON, other fields, no UTF-8, or nested too deeply."""
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """The part of an answer that one line brings: token ids, or text where the server gives no ids.

    is_last: nothing follows, not even the count of cached tokens
    """

    token_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: FinishReason | None = None
    cached_tokens: int | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    is_last: bool = False


class ServerAnswer(Protocol):
    """Reads one streamed answer."""

    def read(self, line: bytes) -> AnswerPiece | None:
        """Read a line; None for one that adds nothing.

        Raises:
            StepFailed: it is no part of such an answer.
            RequestError: the server refuses the request in its stream.
        """
        ...


class ServerApi(Protocol):
    """A server's HTTP API.

    path:      where requests are posted
    takes_ids: whether a prompt goes as token ids, rather than as text
    gives_ids: whether an answer comes as token ids
    headers:   of every request, beside those of its trace
    constrains: whether the server keeps to `SamplingParams.structured`, `logit_bias` and `allowed_token_ids`
    """

    @property
    def path(self) -> str: ...
    @property
    def headers(self) -> Mapping[str, str]: ...
    @property
    def takes_ids(self) -> bool: ...
    @property
    def gives_ids(self) -> bool: ...
    @property
    def constrains(self) -> bool: ...

    def body(self, request: Request, prompt: Sequence[int] | str) -> dict[str, Any]:
        """Make the JSON of a streamed request.

        Raises:
            RequestError: the server has no field for something that the request asks for.
        """
        ...

    def answer(self, request: Request) -> ServerAnswer: ...


def sse_data(line: bytes) -> bytes | None:
    """Give the data of a line of server-sent events; None for comments, other fields, and the end mark.

    Raises:
        StepFailed: the line is no server-sent event.
    """
    if line.startswith(_DATA):
        data = line[len(_DATA) :].strip()
        return None if data == _DONE or not data else data
    if line.startswith((b":", b"event:", b"id:", b"retry:")):
        return None
    raise garbage(line)


def is_end(line: bytes) -> bool:
    """Say whether a line is the end mark of OpenAI's streams."""
    return line.startswith(_DATA) and line[len(_DATA) :].strip() == _DONE


def garbage(line: bytes, why: object = "") -> StepFailed:
    """Make the error for a line that does not belong to this API."""
    shown = line[:80].decode("utf-8", "replace")
    return StepFailed(
        f"the server sent a line that is no part of an answer: {shown!r}{f' ({why})' if why else ''}"
    )


def decode(decoder: msgspec.json.Decoder[T], line: bytes) -> T:
    """Decode JSON; raises StepFailed for other bytes, or for fields of other types."""
    try:
        return decoder.decode(line)
    except UNREADABLE as error:
        raise garbage(line, error) from error


class ServerError(msgspec.Struct):
    """An error that a server reports within a stream."""

    message: str | None = None
    type: str | None = None
    code: int | str | None = None


def reported(error: ServerError | str) -> PenstockError:
    """Make the error for one that the server reports within a stream, as an object or as its text alone."""
    if isinstance(error, str):
        return stream_error(error)
    return stream_error(error.message or error.type or str(error.code), error.code)


def stream_error(message: str, code: object = None) -> PenstockError:
    """Make the error for one that the server reports within a stream."""
    if isinstance(code, int) and 400 <= code < 500 and code not in {408, 429}:
        return RequestError(message)
    return StepFailed(f"the server ended the answer: {message}")


def finish_of(reason: str | None) -> FinishReason | None:
    """Map a finish reason.

    Raises:
        StepFailed: the server gave the request up.
    """
    if not reason:  # some servers say "" where others say null
        return None
    if reason in {"length", "max_tokens", "limit"}:
        return FinishReason.LENGTH
    if reason in {"abort", "aborted", "error", "cancelled"}:
        raise StepFailed(f"the server ended the answer with {reason!r}")
    return FinishReason.STOP  # stop, eos, content_filter, repetition, ...


def client_salt(request: Request) -> str | None:
    """Give the client's `cache_salt`, which follows the model's own in `Request.salt`; None without one."""
    _, mark, salt = request.salt.partition(CLIENT_SALT)
    return salt.decode("utf-8", "replace") if mark else None


def tokens_left(request: Request) -> int:
    """Count the tokens that a request may still get: `max_tokens` less the tokens that another worker has emitted."""
    return request.sampling.max_tokens - request.num_emitted


def min_tokens_left(request: Request) -> int:
    return max(request.sampling.min_tokens - request.num_emitted, 0)


def seed_of(request: Request) -> int | None:
    """Return a seed that differs between the choices of a request, and between its start and a continuation."""
    seed = request.sampling.seed
    if seed is None or request.sampling.seed_drawn:  # servers sample faster without one
        return None
    return (seed + request.choice + 1_000_003 * request.num_emitted) & _SEED_MAX


def changed(sampling: SamplingParams, **names: str) -> dict[str, Any]:
    """Give the sampling fields that differ from their defaults, under the server's names: `changed(s, top_k="top_k")`."""
    usual = SamplingParams(max_tokens=sampling.max_tokens)
    fields = {theirs: getattr(sampling, ours) for ours, theirs in names.items()}
    return {
        theirs: value
        for (ours, theirs), value in zip(names.items(), fields.values(), strict=True)
        if value != getattr(usual, ours)
    }


def top_of(candidates: Sequence[tuple[int, float]], count: int) -> tuple[tuple[int, float], ...]:
    """Give the `count` most likely (token id, logprob), without infinities."""
    finite = [(token_id, logprob) for token_id, logprob in candidates if math.isfinite(logprob)]
    return tuple(sorted(finite, key=lambda pair: -pair[1])[:count])
