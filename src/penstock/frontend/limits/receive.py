"""Receives bodies: their size, their compression, and how many bytes of unfinished requests a process holds.

When the receive budget is used up the largest unfinished body is dropped, so that a client which sends large bodies and never finishes
them does not block others. Compressed bodies are inflated in slices off the event loop, never beyond the largest body allowed: 2 MB may
inflate to 2 GB.
"""

import asyncio
import errno
import zlib
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Literal, Self

from aiohttp import StreamReader, web
from prometheus_client import CollectorRegistry, Counter, Gauge

from penstock.core.errors import Overloaded, RequestError
from penstock.frontend.errors import BodyEncodingError, BodySizeError


class ReceiveMetrics:
    """Receive metrics of one process. A registry can hold one per prefix."""

    def __init__(self, registry: CollectorRegistry, prefix: str) -> None:
        """Register metrics whose names begin with `prefix`."""
        self._received = Gauge(
            f"{prefix}_received_bytes",
            "Bytes of requests that have come and are not encoded yet (receive.bytes_max).",
            registry=registry,
            multiprocess_mode="livesum",
        )
        self._refused_bodies = Counter(
            f"{prefix}_refused_bodies",
            "Requests refused before they had come whole: too late, too large, or no room for more.",
            ["reason"],
            registry=registry,
        )
        self._accept_failures = Counter(
            f"{prefix}_accept_failures",
            "Times that no connection could be accepted, by the system's error; EMFILE is: out of descriptors.",
            ["error"],
            registry=registry,
        )

    def received(self, change_bytes: int) -> None:
        self._received.inc(change_bytes)

    def refused_body(self, reason: Literal["headers_late", "body_late", "size", "room"]) -> None:
        self._refused_bodies.labels(reason).inc()

    def accept_failed(self, error: OSError) -> None:
        self._accept_failures.labels(errno.errorcode.get(error.errno or 0, "unknown")).inc()


_RETRY_AFTER_S = 1.0


class ReceivedBytes:
    """The bytes of one request or connection in the budget. Entered, they are released at the block's end."""

    __slots__ = ("_budget", "_drop", "size_bytes")

    def __init__(self, budget: "ReceiveBudget", drop: Callable[[Overloaded], None]) -> None:
        self._budget = budget
        self._drop = drop
        self.size_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def take(self, size_bytes: int) -> None:
        """Count received bytes.

        Raises:
            Overloaded: the budget is used up and no unfinished body is larger.
        """
        if not self.size_bytes:
            self._budget.unfinished.add(self)
        self.size_bytes += size_bytes
        self._budget.change(size_bytes)
        self._budget.reclaim(self)

    def settle(self) -> None:
        """Mark the body as complete: it can no longer be dropped for others."""
        self._budget.unfinished.discard(self)

    def release(self) -> None:
        """Return its bytes to the budget. Safe twice."""
        self._budget.unfinished.discard(self)
        self._budget.change(-self.size_bytes)
        self.size_bytes = 0

    def drop(self, why: Overloaded) -> None:
        self.release()
        self._drop(why)


class ReceiveBudget:
    """The budget of all connections of a process. One event loop owns it."""

    def __init__(self, bytes_max: int, metrics: ReceiveMetrics, *, settings: str = "frontend.") -> None:
        """Set the budget; `settings` is the prefix of setting names in error texts."""
        self.unfinished: set[ReceivedBytes] = set()
        self.size_bytes = 0
        self._bytes_max = bytes_max
        self._metrics = metrics
        self.settings = settings

    def hold(self, drop: Callable[[Overloaded], None]) -> ReceivedBytes:
        """Count a request's bytes until the block ends; `drop` is called if the request is dropped for others."""
        return ReceivedBytes(self, drop)

    def change(self, size_bytes: int) -> None:
        if size_bytes:
            self.size_bytes += size_bytes
            self._metrics.received(size_bytes)

    def reclaim(self, asking: ReceivedBytes) -> None:
        """Drop the largest unfinished bodies until the budget suffices.

        Raises:
            Overloaded: `asking` itself is the largest.
        """
        while self.size_bytes > self._bytes_max:
            largest = max(self.unfinished, key=lambda received: received.size_bytes, default=asking)
            why = Overloaded(
                f"{self.size_bytes} bytes of requests are being received, more than the {self._bytes_max} that there is "
                f"room for, and no unfinished body is larger than this one; try again later, or raise {self.settings}receive.bytes_max",
                retry_after_s=_RETRY_AFTER_S,
            )
            self._metrics.refused_body("room")
            if largest is asking:
                asking.release()
                raise why
            largest.drop(why)


ENCODINGS = ("gzip", "deflate", "identity")
_WINDOW_BITS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
_IN_BYTES = 64 << 10
_OUT_BYTES = 256 << 10  # about 1 ms to inflate (2 cores of an AMD EPYC)
_MEMBERS_MAX = 16  # gzip members per body; clients send one
_ZLIB_METHOD = 8  # low half of a zlib stream's first byte (RFC 1950)


class BodyReader:
    """Reads bodies of at most `bytes_max` bytes, compressed and inflated."""

    def __init__(self, bytes_max: int, metrics: ReceiveMetrics, *, settings: str = "frontend.") -> None:
        """Set limits; `settings` is the prefix of setting names in error texts."""
        self._bytes_max = bytes_max
        self._metrics = metrics
        self._settings = settings

    async def read(self, request: web.Request, received: ReceivedBytes) -> list[bytes]:
        """Read the whole body and inflate it; the caller sets the deadline.

        Returns:
            The body's bytes, in pieces.

        Raises:
            BodyEncodingError: unknown Content-Encoding (415).
            BodySizeError: larger than `bytes_max` (413).
            Overloaded: the receive budget is used up (503).
            RequestError: the bytes are not valid in the given Content-Encoding.
        """
        encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
        if encoding not in ENCODINGS:
            raise BodyEncodingError(
                f"Content-Encoding: {encoding[:40]!r} is not understood; send one of {', '.join(ENCODINGS)}"
            )
        if (request.content_length or 0) > self._bytes_max:
            raise self._too_large()
        body = await self._read_raw(request.content, received)
        if encoding != "identity":
            body = await self._inflate(b"".join(body), encoding, received)
        received.settle()
        return body

    async def _read_raw(self, content: StreamReader, received: ReceivedBytes) -> list[bytes]:
        if content.is_eof():  # the usual case: the body came with the headers
            whole = content.read_nowait()
            self._take(len(whole), 0, received)
            return [whole]
        chunks: list[bytes] = []
        size_bytes = 0
        while chunk := await content.readany():
            self._take(len(chunk), size_bytes, received)
            size_bytes += len(chunk)
            chunks.append(chunk)
        return chunks

    async def _inflate(self, body: bytes, encoding: str, received: ReceivedBytes) -> list[bytes]:
        loop = asyncio.get_running_loop()
        slices = _inflated(body, encoding)
        inflated: list[bytes] = []
        size_bytes = 0
        try:
            piece = next(slices, None)
            while piece is not None:
                self._take(len(piece), size_bytes, received)
                size_bytes += len(piece)
                inflated.append(piece)
                piece = await loop.run_in_executor(None, next, slices, None)
        except zlib.error as error:
            raise RequestError(
                f"Content-Encoding: the body is not valid {encoding}: {error}; compress it again, or send it as it is"
            ) from error
        return inflated

    def _take(self, size_bytes: int, before_bytes: int, received: ReceivedBytes) -> None:
        if before_bytes + size_bytes > self._bytes_max:
            raise self._too_large()
        received.take(size_bytes)

    def _too_large(self) -> BodySizeError:
        self._metrics.refused_body("size")
        return BodySizeError(
            f"the body is larger than {self._bytes_max} bytes; send less, or raise {self._settings}body_bytes_max"
        )


def _inflated(body: bytes, encoding: str) -> Iterator[bytes]:
    """Inflate in slices.

    Raises:
        zlib.error: not this encoding, or truncated.
    """
    window_bits = _WINDOW_BITS[encoding]
    if encoding == "deflate" and body and body[0] & 0xF != _ZLIB_METHOD:
        window_bits = -zlib.MAX_WBITS  # some clients send raw deflate without the zlib header
    engine = zlib.decompressobj(window_bits)
    at, rest, slice_, members = 0, b"", b"", 1
    while rest or at < len(body) or (len(slice_) == _OUT_BYTES and not engine.eof):
        if not rest:
            rest = body[at : at + _IN_BYTES]
            at += _IN_BYTES
        if engine.eof:
            members += 1
            if encoding != "gzip" or members > _MEMBERS_MAX:
                raise zlib.error("bytes follow its end")
            engine = zlib.decompressobj(window_bits)
        slice_ = engine.decompress(rest, _OUT_BYTES)
        rest = engine.unused_data if engine.eof else engine.unconsumed_tail
        yield slice_
    if not engine.eof:
        raise zlib.error("it ends too soon")
