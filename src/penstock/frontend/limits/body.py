"""Reads a request's body within its deadline, its size limit and the receive budget of the process.

Compressed bodies are inflated here, in slices off the event loop and never beyond the largest body allowed:
2 MB may inflate to 2 GB.
"""

import asyncio
import zlib
from collections.abc import Iterator

from aiohttp import StreamReader, web

from penstock.core.errors import RequestError
from penstock.frontend.errors import BodyEncodingError, BodySizeError
from penstock.frontend.limits.receive_budget import Received
from penstock.frontend.limits.receive_metrics import ReceiveMetrics

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

    async def read(self, request: web.Request, received: Received) -> list[bytes]:
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

    async def _read_raw(self, content: StreamReader, received: Received) -> list[bytes]:
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

    async def _inflate(self, body: bytes, encoding: str, received: Received) -> list[bytes]:
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

    def _take(self, size_bytes: int, before_bytes: int, received: Received) -> None:
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
