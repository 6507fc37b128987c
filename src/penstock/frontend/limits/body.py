"""A request's body, read as it comes: within its time, its size, and the room for all of them.

Compressed bodies are inflated here, in slices off the event loop and never further than the largest body allowed:
two megabytes may hold two gigabytes.
"""

import asyncio
import zlib
from collections.abc import Iterator

from aiohttp import StreamReader, web

from penstock.core.errors import RequestError
from penstock.frontend.errors import BodyEncodingError, BodySizeError
from penstock.frontend.limits.receive_metrics import ReceiveMetrics
from penstock.frontend.limits.receiving import Received

ENCODINGS = ("gzip", "deflate", "identity")
_WINDOW_BITS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
_IN_BYTES = 64 << 10
_OUT_BYTES = 256 << 10  # about 1 ms of work (2 cores of an AMD EPYC)
_MEMBERS_MAX = 16  # of a gzip file; clients send one
_ZLIB_METHOD = 8  # in the low half of a zlib stream's first byte (RFC 1950)


class BodyReader:
    """Reads bodies of at most so many bytes, before and after decompression."""

    def __init__(self, bytes_max: int, metrics: ReceiveMetrics, *, settings: str = "frontend.") -> None:
        """Prepare; refusals name settings that begin with `settings`."""
        self._bytes_max = bytes_max
        self._metrics = metrics
        self._settings = settings

    async def read(self, request: web.Request, received: Received) -> list[bytes]:
        """Give the body in the pieces that came, inflated, once it is there; whoever calls limits the time.

        Raises:
            BodyEncodingError: it is compressed in an unknown way (415).
            BodySizeError: it is too large (413).
            Overloaded: there is no room for it (503).
            RequestError: it does not hold what its Content-Encoding says.
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
        if content.is_eof():  # the usual case: it came with its headers
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
        zlib.error: this is not what the encoding says, or ends too soon.
    """
    window_bits = _WINDOW_BITS[encoding]
    if encoding == "deflate" and body and body[0] & 0xF != _ZLIB_METHOD:
        window_bits = -zlib.MAX_WBITS  # some clients send it without the header that the name implies
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
