"""How a request arrives: its body within its size and the receive budget, its place among the requests in flight, and its deadline."""

import asyncio
import errno
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import Literal, Self

from aiohttp import StreamReader, web
from prometheus_client import CollectorRegistry, Counter, Gauge

from penstock.core.errors import DeadlineExceeded, Overloaded, PenstockError, RequestError, Unavailable
from penstock.frontend.errors import BodyEncodingError, BodySizeError, ReceiveTimeoutError
from penstock.frontend.limits.tenants import RequestUse

_RESOLUTION_S = 1e-3
"""Timers of uvloop may fire so much before their time."""


@dataclass(slots=True, eq=False)
class RequestSlot:
    """One request: arriving while its body is received, in flight once admitted. Entered, it is left at the block's end."""

    arrived: float  # arrived and deadline are event loop time
    deadline: float
    timeout_s: float
    settings: str = "frontend."  # prefix of setting names in error texts
    admitted: bool = False
    media_bytes: int = 0  # that it holds, see `requests/media.py`
    tenant: str = ""
    use: RequestUse | None = None  # of its tenant's limits
    leave: "Callable[[RequestSlot], None] | None" = None  # called when it has ended
    _ending: PenstockError | None = None  # set when ended before the deadline
    _limit: "_Limit | None" = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.leave is not None:
            self.leave(self)

    def limit(self) -> "_Limit":
        """Cancel the block at the deadline.

        Raises:
            ReceiveTimeoutError: the deadline passed before the body was complete.
            DeadlineExceeded: the deadline passed after admission.
            PenstockError: `end` was called with this error.
        """
        return _Limit(self)

    def end(self, why: PenstockError) -> None:
        """End the request now with this error."""
        self._ending = why
        self.move_deadline(asyncio.get_running_loop().time())

    def move_deadline(self, deadline: float) -> None:
        """Set another deadline, also for the block of `limit` that runs."""
        self.deadline = deadline
        if self._limit is not None:
            self._limit.moved()

    def _why_ended(self) -> PenstockError:
        if self._ending is not None:
            return self._ending
        if not self.admitted:
            return ReceiveTimeoutError(
                f"the body had not come whole {self.timeout_s:g} s after the headers; send it faster, or raise "
                f"{self.settings}receive.timeout_s"
            )
        return DeadlineExceeded(
            f"the request took longer than {self.timeout_s:g} s; ask for fewer tokens, or raise "
            "frontend.request_timeout_s"
        )


class _Limit:
    """Cancels the task that runs its block at the slot's deadline, as `asyncio.timeout` would in three times the time.

    The timer stays where it is when the deadline moves away, as it does once the body is there, and is set again when it fires.
    """

    __slots__ = ("_cancelling", "_has_expired", "_loop", "_slot", "_task", "_timer", "_timer_s")

    def __init__(self, slot: RequestSlot) -> None:
        self._slot = slot
        self._has_expired = False

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "a request has a task"
        self._task, self._cancelling, self._loop = task, task.cancelling(), task.get_loop()
        self._slot._limit = self
        self._set_timer()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._slot._limit = None
        self._timer.cancel()
        is_ours = self._has_expired and self._task.uncancel() <= self._cancelling
        if is_ours and kind is not None and issubclass(kind, asyncio.CancelledError):
            raise self._slot._why_ended() from error

    def moved(self) -> None:
        """Take the slot's new deadline."""
        if not self._has_expired and self._slot.deadline < self._timer_s:
            self._timer.cancel()
            self._set_timer()

    def _set_timer(self) -> None:
        self._timer_s = self._slot.deadline
        self._timer = self._loop.call_at(self._timer_s, self._check)

    def _check(self) -> None:
        if self._slot.deadline > self._loop.time() + _RESOLUTION_S:
            self._set_timer()
            return
        self._has_expired = True
        self._task.cancel()


class RequestAdmission:
    """Counts and limits requests. One event loop owns it."""

    def __init__(
        self,
        *,
        inflight_max: int,
        request_timeout_s: float,
        receive_timeout_s: float,
        retry_after_s: Callable[[], float],
        on_left: Callable[[RequestSlot], None] = lambda _: None,
    ) -> None:
        """Admit at most `inflight_max` requests; `on_left` is called with each slot as it ends."""
        self._inflight_max = inflight_max
        self._timeout_s = request_timeout_s
        self._receive_timeout_s = receive_timeout_s
        self._retry_after_s = retry_after_s
        self._on_left = on_left
        self._slots: set[RequestSlot] = set()
        self._inflight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._patience: asyncio.Timeout | None = None

    @cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        """The loop that owns it, asked for once: asking takes a system call, half a microsecond."""
        return asyncio.get_running_loop()

    @property
    def inflight(self) -> int:
        """Requests admitted and not ended."""
        return self._inflight

    def arrive(self) -> RequestSlot:
        """Track a request until its slot is left. It does not count against `inflight_max` while its body arrives."""
        now = self._loop.time()
        slot = RequestSlot(now, now + self._receive_timeout_s, self._receive_timeout_s, leave=self._left)
        self._slots.add(slot)
        self._idle.clear()
        return slot

    def admit(self, slot: RequestSlot) -> None:
        """Count a request as in flight and start its `request_timeout_s`.

        Raises:
            Overloaded: `inflight_max` requests are in flight.
        """
        if self._inflight >= self._inflight_max:
            raise Overloaded(
                f"{self._inflight} requests are under way, as many as this frontend takes (frontend.inflight_max); try again later",
                retry_after_s=self._retry_after_s(),
            )
        self._inflight += 1
        slot.admitted = True
        slot.arrived = self._loop.time()
        slot.timeout_s = self._timeout_s
        slot.move_deadline(slot.arrived + self._timeout_s)

    def _left(self, slot: RequestSlot) -> None:
        try:
            self._on_left(slot)
        finally:
            self._slots.discard(slot)
            self._inflight -= slot.admitted
            if not self._slots:
                self._idle.set()

    async def drain(self, timeout_s: float) -> int:
        """Wait until no request is left, and end the remaining ones after `timeout_s` seconds.

        Returns:
            Number of requests ended.
        """
        try:
            async with asyncio.timeout(timeout_s) as self._patience:
                await self._idle.wait()
        except TimeoutError:
            slots = list(self._slots)
            for slot in slots:
                slot.end(Unavailable("the server is shutting down; try again"))
            return len(slots)
        finally:
            self._patience = None
        return 0

    def hurry(self) -> None:
        """Make a running `drain` stop waiting."""
        if self._patience is not None and not self._patience.expired():
            self._patience.reschedule(asyncio.get_running_loop().time())


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
