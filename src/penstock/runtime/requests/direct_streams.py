"""Streams whose tokens become bytes for the client by a fixed rule: the table of one connection to a worker.

A frame's deltas with nothing but tokens are taken out of the frame, and at the end of the turn each stream gets all its tokens as
one chunk. Every other delta is left to the reader of the frame. A turn's deltas of one stream are one chunk, since a frontend that is
behind its workers finds several steps in one read.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol

import msgspec

from penstock.core.ids import RequestId
from penstock.core.json_text import encode_json
from penstock.core.native import native
from penstock.core.types.requests import Delta
from penstock.core.wire import PackedTokens, Wire, token_list
from penstock.seams import DirectClient


class _Decoder(Protocol):
    def feed(self, token_ids: Iterable[int]) -> str: ...


class DirectStreamPython:
    """The rule of one stream, and its counts. One event loop owns it."""

    def __init__(self, decoder: _Decoder, before: bytes, after: bytes, *, is_chunked: bool) -> None:
        """Make a stream that is not open.

        Args:
            decoder: of this stream; whoever else decodes its tokens uses the same one.
            before: of each chunk, in front of its text as a JSON string.
            after: of each chunk, behind the text.
            is_chunked: whether chunks are framed as HTTP/1.1 wants them.
        """
        self.tokens = 0
        """Tokens that were written."""
        self.last_s = 0.0
        """Event loop time of the latest tokens."""
        self.sent_s = 0.0
        """Event loop time of the latest chunk."""
        self.gaps_s = 0.0
        """Seconds between tokens that were written, in all."""
        self._decoder = decoder
        self._before = before
        self._after = after
        self._is_chunked = is_chunked

    def chunk(self, packed: bytes, now_s: float) -> tuple[bytes, float]:
        """Count tokens; give their chunk, empty while all text is held back, and the mean gap between them."""
        count = len(packed) >> 2
        text = self._decoder.feed(token_list(packed))
        gap_s = now_s - self.last_s
        self.last_s = now_s
        self.gaps_s += gap_s
        self.tokens += count
        if not text:
            return b"", gap_s / count
        self.sent_s = now_s
        body = self._before + encode_json(text) + self._after
        return (b"%x\r\n%b\r\n" % (len(body), body) if self._is_chunked else body), gap_s / count


@dataclass(slots=True)
class _Open:
    stream: DirectStreamPython
    client: DirectClient
    written: bytearray = field(default_factory=bytearray)
    waiting: bytearray = field(default_factory=bytearray)
    ungranted: int = 0


class DirectStreamsPython:
    """The open direct streams of one connection. One event loop owns it."""

    def __init__(self, grant_tokens: int) -> None:
        """Args: grant_tokens: so many tokens of a stream are granted at once."""
        self._grant_tokens = grant_tokens
        self._open: dict[RequestId, _Open] = {}
        self._waiting: dict[RequestId, _Open] = {}

    def __len__(self) -> int:
        return len(self._open)

    def open(self, request_id: RequestId, stream: DirectStreamPython, client: DirectClient) -> None:
        """Take a request's plain deltas from now on. What `client` calls may close any stream.

        Raises:
            ValueError: it is open already.
        """
        if request_id in self._open:
            raise ValueError(f"{request_id}: open already")
        self._open[request_id] = _Open(stream, client)

    def close(self, request_id: RequestId) -> tuple[bytes, bytes, int] | None:
        """Take no more; give the packed tokens that were written, those that were not, and how many are to be granted.

        None if it is not open.
        """
        entry = self._open.pop(request_id, None)
        if entry is None:
            return None
        self._waiting.pop(request_id, None)
        return bytes(entry.written), bytes(entry.waiting), entry.ungranted

    def feed(self, payload: bytes) -> bytes | None:
        """Take the plain deltas of open streams out of a frame's payload.

        Returns:
            The payload without them, empty if nothing is left; None if nothing was taken, also of a payload that is no message.
        """
        if not payload.startswith(_HEAD):
            return None
        try:
            raws = _frames.decode(payload).deltas
            deltas = [_deltas.decode(raw) for raw in raws]
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            return None
        rest: list[msgspec.Raw] = []
        kept: set[RequestId] = set()
        taken = False
        for raw, delta in zip(raws, deltas, strict=True):
            entry = self._open.get(delta.request_id)
            if entry is None or delta.request_id in kept or not _is_plain(raw, delta):
                rest.append(raw)
                kept.add(delta.request_id)  # what follows must not overtake it
                continue
            entry.waiting += delta.token_ids
            self._waiting[delta.request_id] = entry
            taken = True
        if not taken:
            return None
        return _encoder.encode(_Frame(deltas=tuple(rest))) if rest else b""

    def flush(self, now_s: float) -> tuple[int, list[tuple[RequestId, int]], BaseException | None]:
        """Write what waits, one chunk a stream, and only then call anything else: a client that is woken by the first one finds all.

        Returns:
            How many tokens were written, (request id, tokens) to be granted, and the first exception that a client's calls
            raised: the other clients are called all the same.
        """
        waiting, self._waiting = self._waiting, {}
        tokens = 0
        grants: list[tuple[RequestId, int]] = []
        chunks: list[tuple[_Open, bytes, float]] = []
        for request_id, entry in waiting.items():
            count = len(entry.waiting) >> 2
            chunks.append((entry, *entry.stream.chunk(bytes(entry.waiting), now_s)))
            entry.written += entry.waiting
            entry.waiting.clear()
            tokens += count
            entry.ungranted += count
            if entry.ungranted >= self._grant_tokens:
                grants.append((request_id, entry.ungranted))
                entry.ungranted = 0
        failure: Exception | None = None
        gone = [False] * len(chunks)
        for index, (entry, chunk, _) in enumerate(chunks):
            try:
                gone[index] = not _write(entry.client.transport, chunk)
            except Exception as error:  # noqa: BLE001 - the others are written to
                failure = failure or error
        for (entry, chunk, gap_s), is_gone in zip(chunks, gone, strict=True):
            try:
                _tell(entry.client, chunk, gap_s, is_gone=is_gone)
            except Exception as error:  # noqa: BLE001 - the others are told first
                failure = failure or error
        return tokens, grants, failure


def _write(transport: asyncio.WriteTransport, chunk: bytes) -> bool:
    """Write a chunk if it is one; False if the client is gone."""
    if not chunk:
        return True
    if transport.is_closing():
        return False
    transport.write(chunk)
    return True


def _tell(client: DirectClient, chunk: bytes, gap_s: float, *, is_gone: bool) -> None:
    client.passed(gap_s)
    if is_gone or (chunk and client.transport.get_write_buffer_size() > client.buffer_bytes):
        client.interrupted(is_gone)


class _Frame(Wire, frozen=True, tag="deltas"):
    """`Deltas`, each still encoded."""

    deltas: tuple[msgspec.Raw, ...]


_HEAD = b"\x82\xa4type\xa6deltas\xa6deltas"
_frames = msgspec.msgpack.Decoder(_Frame)
_deltas = msgspec.msgpack.Decoder(Delta)
_encoder = msgspec.msgpack.Encoder()


def _is_plain(raw: bytes, delta: Delta) -> bool:
    """Say whether a delta has tokens and nothing else, written as our encoder writes it."""
    size = len(delta.token_ids)
    plain = _plain(delta.request_id, delta.token_ids)
    return size > 0 and size % 4 == 0 and bytes(raw) == _encoder.encode(plain)


def _plain(request_id: RequestId, token_ids: PackedTokens) -> Delta:
    return Delta(request_id=request_id, token_ids=token_ids)


if TYPE_CHECKING or native is None:
    DirectStream = DirectStreamPython
    DirectStreams = DirectStreamsPython
else:
    DirectStream = native.DirectStream
    _head, _tail = _encoder.encode(_plain(RequestId(""), PackedTokens(b"1234"))).split(b"\xa0\xc4\x041234")
    DirectStreams = partial(native.DirectStreams, delta_head=_head, delta_tail=_tail)


def is_direct(decoder: _Decoder) -> bool:
    """Say whether `DirectStream` takes this decoder: native streams take native ones."""
    return native is None or isinstance(decoder, native.ByteDecoder)
