"""One request and its streamed answer, with times at the client."""

from dataclasses import dataclass, field
from enum import StrEnum

import msgspec


class Failure(StrEnum):
    """Kinds of failed requests; an HTTP status is a kind such as `http_429`."""

    CONNECT = "connect"  # no connection to the address
    DISCONNECTED = "disconnected"  # the response ended early
    TIMEOUT = "timeout"
    STREAM_ERROR = "stream_error"  # an error event in the stream
    MALFORMED = "malformed"  # not HTTP, not server-sent events, not JSON
    EMPTY = "empty"  # a complete answer without a token


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Error(msgspec.Struct):
    message: str = ""


class _Chunk(msgspec.Struct):
    id: str | None = None
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | str | None = None


_chunks = msgspec.json.Decoder(_Chunk)
_MESSAGE_CHARACTERS_MAX = 200
_EVENT_BYTES_MAX = 1 << 20


@dataclass(slots=True)
class Exchange:
    """Parses the response body as it arrives.

    Times are `time.perf_counter`, as uvloop's clock has a resolution of 1 ms. `due_s` is the planned send time: latencies
    count from it, so that delays of a slow client or server are included.
    """

    due_s: float
    sent_s: float = 0.0
    first_token_s: float | None = None
    last_token_s: float = 0.0
    end_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    """Seconds between chunks with text; a chunk may hold several tokens."""
    usage: _Usage | None = None
    failure: str | None = None
    message: str = ""
    answer_id: str = ""
    """Id of the answer."""
    done: bool = False
    """Whether `[DONE]` arrived."""
    _rest: bytes = b""

    def feed(self, body: bytes, now_s: float) -> None:
        """Parse the next bytes of a stream of server-sent events."""
        if b"\r" in body:
            body = body.replace(b"\r\n", b"\n")
        *events, self._rest = (self._rest + body).split(b"\n\n")
        for event in events:
            self._take_event(event, now_s)
        if len(self._rest) > _EVENT_BYTES_MAX:
            self.fail(Failure.MALFORMED, f"an event of more than {_EVENT_BYTES_MAX} bytes")
            self._rest = b""

    def _take_event(self, event: bytes, now_s: float) -> None:
        if not event.startswith(b"data:"):  # a comment, or a field before the data
            event = next((line for line in event.split(b"\n") if line.startswith(b"data:")), b"")
        data = event[len(b"data:") :].strip()
        if not data:
            return
        if data == b"[DONE]":
            self.done = True
            return
        try:
            chunk = _chunks.decode(data)
        except msgspec.DecodeError as error:
            self.fail(Failure.MALFORMED, f"{error} in {data.decode(errors='replace')}")
            return
        if chunk.error is not None:
            self.fail(
                Failure.STREAM_ERROR, chunk.error if isinstance(chunk.error, str) else chunk.error.message
            )
        if chunk.usage is not None:
            self.usage = chunk.usage
        self.answer_id = self.answer_id or chunk.id or ""
        if any(choice.text or _has_text(choice.delta) for choice in chunk.choices):
            self._take_token(now_s)

    def _take_token(self, now_s: float) -> None:
        if self.first_token_s is None:
            self.first_token_s = now_s
        else:
            self.gaps_s.append(now_s - self.last_token_s)
        self.last_token_s = now_s

    def refuse(self, status: int, body: bytes) -> None:
        """Record a response with an error status."""
        try:
            error = _chunks.decode(body).error
        except msgspec.DecodeError:
            error = None
        message = error.message if isinstance(error, _Error) else error or body.decode(errors="replace")
        self.fail(f"http_{status}", message)

    def fail(self, failure: str, message: str) -> None:
        """Record a failure; the first one stays."""
        if self.failure is None:
            self.failure = failure
            self.message = " ".join(message.split())[:_MESSAGE_CHARACTERS_MAX]

    def finish(self, now_s: float) -> None:
        """Record the end of the body, complete or not."""
        self.end_s = now_s
        if not self.done:
            self.fail(Failure.DISCONNECTED, "the answer ended before its last event, data: [DONE]")
        elif self.first_token_s is None:
            if self.output_tokens == 0:
                self.fail(Failure.EMPTY, "the answer held no token")
            self.first_token_s = self.last_token_s = now_s  # tokens without text

    @property
    def output_tokens(self) -> int:
        """Output tokens: the server's count, else one per chunk."""
        if self.usage is not None:
            return self.usage.completion_tokens
        return 0 if self.first_token_s is None else 1 + len(self.gaps_s)

    @property
    def cached_tokens(self) -> int | None:
        """Cached prompt tokens; None if the server does not report them."""
        details = None if self.usage is None else self.usage.prompt_tokens_details
        return None if details is None else details.cached_tokens

    @property
    def ttft_s(self) -> float:
        return (self.first_token_s or self.end_s) - self.due_s

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.due_s

    @property
    def time_per_token_s(self) -> float | None:
        """Mean seconds between tokens; None for one token."""
        if self.first_token_s is None or self.output_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.output_tokens - 1)


def _has_text(delta: _Delta | None) -> bool:
    return delta is not None and bool(delta.content or delta.reasoning_content)
