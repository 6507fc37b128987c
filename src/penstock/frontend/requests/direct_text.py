"""The rule by which a choice's tokens become chunks of its stream while nothing has to be decided: no stop strings, no parser."""

import asyncio
from typing import Protocol

from penstock.frontend.metrics import RequestTimer
from penstock.frontend.text.detokenize import TextDecoder
from penstock.runtime.requests.direct_streams import DirectStream
from penstock.seams import DirectClient, Hold, Interrupt


class ChunkWriter(Protocol):
    """A stream of chunks to a client."""

    def around_text(self, index: int) -> tuple[bytes, bytes, bool] | None:
        """Give the bytes around the text of a choice's plain chunks, and whether they are HTTP's; None before the first chunk."""
        ...

    def client(self, stream: DirectStream) -> tuple[asyncio.WriteTransport, int] | None:
        """Let a stream write chunks as they are; give where to, and how many bytes may be unsent. None: the client is gone."""
        ...

    def why(self, *, is_gone: bool) -> Hold | Exception:
        """Give what has to be waited for until a client that is behind has read, or the error for one that is gone."""
        ...


class DirectText:
    """The `DirectSink` of one choice, and the time of its latest tokens by either way. One event loop owns it."""

    def __init__(self, index: int, decoder: TextDecoder, timer: RequestTimer, writer: ChunkWriter) -> None:
        self._index = index
        self._decoder = decoder
        self._timer = timer
        self._writer = writer
        self._last_s: float | None = None
        self._stream: DirectStream | None = None

    @property
    def tokens(self) -> int:
        """Tokens that were written by the rule."""
        return 0 if self._stream is None else self._stream.tokens

    def step(self, now_s: float) -> float | None:
        """Note tokens that come to the sink now; give the time of those before, None before the first."""
        last_s = self._last_s if self._stream is None else self._stream.last_s
        if self._stream is None:
            self._last_s = now_s
        else:
            self._stream.last_s = now_s
        return last_s

    def open(self, interrupt: Interrupt) -> tuple[DirectStream, DirectClient] | None:
        if self._stream is None:
            around = self._writer.around_text(self._index)
            if around is None or self._last_s is None:
                return None
            before, after, is_chunked = around
            self._stream = DirectStream(self._decoder, before, after, is_chunked=is_chunked)
            self._stream.last_s = self._last_s
        client = self._writer.client(self._stream)
        if client is None:
            return None

        def interrupted(is_gone: bool) -> None:  # noqa: FBT001 - called by native code
            interrupt(self._writer.why(is_gone=is_gone))

        transport, buffer_bytes = client
        return self._stream, DirectClient(transport, buffer_bytes, self._timer.gather, interrupted)

    def finish(self) -> None:
        """Tell the timer of the gaps that it has not seen."""
        if self._stream is not None:
            self._timer.add_gaps(self._stream.gaps_s, self._stream.tokens)
