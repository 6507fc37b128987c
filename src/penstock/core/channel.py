"""One end of a connection: messages in and out, heartbeats, back-pressure of the write buffer.

An asyncio protocol (callbacks, no tasks) for asyncio's loop and uvloop.
"""

import asyncio
import contextlib
import os
import socket
import struct
from typing import Generic, Protocol, TypeVar, cast

from penstock.core.errors import ProtocolError
from penstock.core.framing import FrameReader, Goodbye, Ping, Pong, UnknownFrame
from penstock.core.log import get_logger

M = TypeVar("M")
M_contra = TypeVar("M_contra", contravariant=True)

_log = get_logger()
_CREDENTIALS = struct.Struct("iII")
"""SO_PEERCRED: process, user and group id of the peer process."""
_HELD_BYTES_MAX = 1 << 14


class Codec(Protocol[M]):
    """Encodes and decodes messages, as `FrameCodec` does."""

    def encode(self, message: M) -> bytes: ...

    def decode(self, payload: bytes) -> M | UnknownFrame: ...


class ChannelHandler(Protocol[M_contra]):
    """Callbacks of a channel, always from the event loop."""

    def channel_opened(self) -> None: ...

    def message_received(self, message: M_contra) -> None:
        """Process one message; the channel itself handles `Ping`, `Pong` and `Goodbye`.

        Raises:
            ProtocolError: the peer may not send this now; the connection ends.
        """
        ...

    def unknown_received(self, tag: str) -> None:
        """Note that a message of a newer peer was skipped."""
        ...

    def channel_writable(self) -> None:
        """The write buffer has room again."""
        ...

    def channel_closed(self, reason: str) -> None:
        """The connection has ended, closed by either side. Called once after `channel_opened`."""
        ...


class FrameChannel(asyncio.Protocol, Generic[M]):
    """Carries messages of one codec over one socket. One event loop owns it."""

    def __init__(
        self,
        codec: Codec[M],
        handler: ChannelHandler[M],
        *,
        frame_bytes_max: int,
        write_buffer_bytes: int,
        write_bytes_max: int,
        heartbeat_interval_s: float,
        heartbeat_timeout_s: float,
    ) -> None:
        """Wait for a transport.

        Args:
            codec: encodes and decodes the messages of this connection.
            handler: receives the messages.
            frame_bytes_max: longest frame accepted.
            write_buffer_bytes: with more bytes than this unsent, the channel is not `writable`.
            write_bytes_max: with more bytes than this unsent, besides the longest frame, the connection is aborted, since the peer
                does not read.
            heartbeat_interval_s: a peer silent for so long is pinged.
            heartbeat_timeout_s: after so long without a byte from the peer the connection is aborted.
        """
        self.peer = "unknown"
        """Address of the peer, for logs."""
        self.unknown_frames = 0
        self.said_goodbye = False
        """Whether the peer closed on purpose."""
        self.closed = asyncio.Event()
        self.leaves_socket = False
        """Whether `left_socket` gets a duplicate of the socket when the connection ends; the caller closes it."""
        self.left_socket: socket.socket | None = None
        self._codec = codec
        self._handler = handler
        self._reader = FrameReader(frame_bytes_max)
        self._write_buffer_bytes = write_buffer_bytes
        self._write_bytes_max = write_bytes_max
        self._interval_s = heartbeat_interval_s
        self._timeout_s = heartbeat_timeout_s
        self._transport: asyncio.Transport | None = None
        self._paused = False
        self._longest_bytes = 0
        """Of the frames written since the write buffer last had room."""
        self._held: list[bytes] = []
        """Frames that wait for the next one, or for the end of this turn of the loop."""
        self._held_bytes = 0
        self._ending = False
        self._reason = ""
        self._heard_s = 0.0
        self._beat_at_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def accept_frames(self, frame_bytes_max: int) -> None:
        """Change the longest frame accepted, for example once the peer has authenticated."""
        self._reader.frame_bytes_max = frame_bytes_max

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._ending

    @property
    def writable(self) -> bool:
        """Whether the write buffer has room, so that a message sent now leaves soon."""
        return self.is_open and not self._paused

    @property
    def local_host(self) -> str:
        """Address of this end; empty without a connection, or over a Unix socket."""
        name = self._transport.get_extra_info("sockname") if self._transport else None
        return str(name[0]) if isinstance(name, tuple) else ""

    @property
    def peer_certificate(self) -> bytes | None:
        """The peer's certificate in DER; None without TLS."""
        secure = self._transport.get_extra_info("ssl_object") if self._transport else None
        return None if secure is None else secure.getpeercert(binary_form=True)

    @property
    def peer_pid(self) -> int:
        """The peer's process id as the kernel knows it; 0 over TCP."""
        sock = self._transport.get_extra_info("socket") if self._transport else None
        if sock is None or sock.family != socket.AF_UNIX:
            return 0
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid: int = _CREDENTIALS.unpack(credentials)[0]
        return pid

    @property
    def buffered_bytes(self) -> int:
        """Bytes in the write buffer."""
        return self._transport.get_write_buffer_size() if self._transport else 0

    @property
    def backlog_bytes(self) -> int:
        """Bytes in the write buffer besides those of the longest frame, which takes its time however fast the peer reads."""
        return max(self.buffered_bytes - self._longest_bytes, 0)

    def send(self, message: M) -> None:
        self.write(self._codec.encode(message))

    def send_soon(self, message: M) -> None:
        """Send a message with the next one, at the latest at the end of this turn of the loop: a write is a system call."""
        if not self.is_open:
            return
        if not self._held:
            asyncio.get_running_loop().call_soon(self._flush)
        frame = self._codec.encode(message)
        self._held.append(frame)
        self._held_bytes += len(frame)
        if self._held_bytes > _HELD_BYTES_MAX:
            self._flush()

    def write(self, frame: bytes) -> None:
        """Send an encoded frame; does nothing once the connection ends."""
        if self._transport is None or self._ending:
            return
        if self._held:
            frame = self._take_held() + frame
        if self._paused and self.backlog_bytes > self._write_bytes_max:
            self.abort(
                f"it does not read: {self.buffered_bytes} bytes wait, more than {self._write_bytes_max} besides the longest"
                " frame"
            )
            return
        self._transport.write(frame)
        if self._paused:
            self._longest_bytes = max(self._longest_bytes, len(frame))

    def _flush(self) -> None:
        if self._held:
            self.write(self._take_held())

    def _take_held(self) -> bytes:
        held, self._held, self._held_bytes = self._held, [], 0
        return b"".join(held)

    def close(self, reason: str) -> None:
        """Send `Goodbye`, flush the write buffer, and end the connection. Safe twice.

        If the peer does not read, the connection is aborted after `heartbeat_timeout_s`.
        """
        if self._transport is not None and not self._ending:
            self._flush()
        if self._transport is not None and not self._ending:
            self._transport.write(self._codec.encode(cast("M", Goodbye(reason=reason))))
            self._end("closed")
            self._transport.close()
            if self._timer is not None:
                self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_later(self._timeout_s, self._transport.abort)

    def abort(self, reason: str) -> None:
        """End the connection now; bytes in the write buffer are lost."""
        if self._transport is not None:
            self._end(reason)
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=self._write_buffer_bytes)
        peer = transport.get_extra_info("peername")
        self.peer = f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else str(peer or "unix socket")
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in {socket.AF_INET, socket.AF_INET6}:
            with contextlib.suppress(OSError):  # the peer may have gone already
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._heard_s = asyncio.get_running_loop().time()
        self._schedule_beat()
        self._handler.channel_opened()

    def data_received(self, data: bytes) -> None:
        self._heard_s = asyncio.get_running_loop().time()
        try:
            for payload in self._reader.feed(data):
                if self._ending:
                    return
                self._receive(self._codec.decode(payload))
        except ProtocolError as error:
            _log.warning("connection_refused", peer=self.peer, error=error.message)
            self.abort(error.message)
        except Exception:  # noqa: BLE001 - a bug in the handler; without an end of the connection the peer would hang
            _log.exception("message_failed", peer=self.peer)
            self.abort("an internal error, see the log")

    def _receive(self, message: M | UnknownFrame) -> None:
        match message:
            case Ping():
                if self.writable:
                    self.send(cast("M", Pong()))
            case Pong():
                pass
            case Goodbye(reason=reason):
                self.said_goodbye = True
                self._reason = f"it said goodbye: {reason}"
            case UnknownFrame(tag=tag):
                self.unknown_frames += 1
                if self.unknown_frames == 1:
                    _log.warning("unknown_frame_skipped", peer=self.peer, tag=tag)
                self._handler.unknown_received(tag)
            case _:
                self._handler.message_received(message)

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._longest_bytes = 0
        if not self._ending:
            self._handler.channel_writable()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._end(str(exc) if exc else "closed by the peer")
        sock = self._transport.get_extra_info("socket") if self._transport and self.leaves_socket else None
        if sock is not None:
            with contextlib.suppress(OSError):  # too many open files
                self.left_socket = socket.socket(fileno=os.dup(sock.fileno()))
        self._transport = None
        self.closed.set()
        self._handler.channel_closed(self._reason)

    def _end(self, reason: str) -> None:
        self._ending = True
        self._reason = self._reason or reason

    def _schedule_beat(self) -> None:
        """Call `_beat` after an interval, or when the peer has been silent for `heartbeat_timeout_s`, if that is sooner."""
        loop = asyncio.get_running_loop()
        self._beat_at_s = min(loop.time() + self._interval_s, self._heard_s + self._timeout_s)
        self._timer = loop.call_at(self._beat_at_s, self._beat)

    def _beat(self) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._beat_at_s > self._interval_s:
            self._heard_s = now  # this process was stopped, not the peer: start the timeout again
        silent_s = now - self._heard_s
        if now >= self._heard_s + self._timeout_s:
            self.abort(f"silent for {silent_s:.1f} s (heartbeat_timeout_s {self._timeout_s:g})")
            return
        if silent_s >= self._interval_s and self.writable:
            self.send(cast("M", Ping()))
        self._schedule_beat()
