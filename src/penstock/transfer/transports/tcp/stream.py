"""One stream of transport `tcp`: a socket that moves one batch at a time on a thread. Any failure breaks the stream.

To end a batch, a side shuts the socket down, which ends the threads' calls on both sides at once; a later transfer opens
another stream. So no byte of an ended transfer is taken for another transfer's.
"""

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from penstock.core.descriptors import OffsetArray
from penstock.core.errors import TransferError, TransferRefused
from penstock.transfer.regions.ranges import settled
from penstock.transfer.transports.tcp.streams import Streamed, StreamEnd, receive_ranges, send_ranges
from penstock.transfer.transports.tcp.tls_streams import receive_ranges_tls, send_ranges_tls
from penstock.transfer.transports.tcp_frames import HEADER_BYTES, Batch

_KEEPALIVE_S = 60
"""An idle stream is probed after this time, so that firewalls keep it and a dead one is closed."""


class StreamBroken(TransferError):  # noqa: N818 - a state
    """The stream ended during a batch; the peer's answer often says why."""


class StreamStalled(TransferError):  # noqa: N818
    """No byte of a batch moved for `idle_s`."""


class StreamRoom:
    """The streams of one agent, their bound and their threads."""

    def __init__(self, streams_max: int, idle_s: float) -> None:
        """Begin without streams.

        Args:
            streams_max: the most open streams.
            idle_s: a batch is aborted after this time without a byte.
        """
        self.idle_s = idle_s
        self.streams: set[DataStream] = set()
        self.executor = ThreadPoolExecutor(streams_max, thread_name_prefix="transfer-tcp")
        self._streams_max = streams_max

    def check_room(self) -> None:
        """Check that one more stream may be opened.

        Raises:
            TransferRefused: there are too many.
        """
        if len(self.streams) >= self._streams_max:
            raise TransferRefused(
                f"{len(self.streams)} streams are open, as many as may be (tcp.streams_max); raise it, or disconnect peers"
            )

    def close(self) -> None:
        """Shut down the threads; all streams are closed by now."""
        self.executor.shutdown(wait=False)


class DataStream:
    """A connected stream socket of one link. The event loop owns it; a thread uses its socket while a batch moves.

    It is idle, and watched for its end; or held by one transfer, which moves batches and then releases or aborts it.
    """

    def __init__(
        self, room: StreamRoom, connection: socket.socket, number: int, ended: Callable[["DataStream"], None]
    ) -> None:
        """Take ownership of a connected socket; begin idle.

        Args:
            room: counts it.
            connection: the socket; its next byte in either direction is of this transport.
            number: its number within the link.
            ended: called once if the stream ends while it is idle.
        """
        self.number = number
        self.is_broken = False
        self.is_held = False
        self._room = room
        self._socket = connection
        self._ended = ended
        self._is_moving = False
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_S)
        room.streams.add(self)
        asyncio.get_running_loop().add_reader(connection, self._arrived)

    def hold(self) -> None:
        """Stop watching it; the holder reads from it."""
        assert not self.is_held, "one holder at a time"
        self.is_held = True
        asyncio.get_running_loop().remove_reader(self._socket)

    def release(self) -> None:
        """Make it idle again; close it if it is broken."""
        assert self.is_held, "held"
        self.is_held = False
        if self.is_broken:
            self._close()
        else:
            asyncio.get_running_loop().add_reader(self._socket, self._arrived)

    async def send(self, batch: Batch) -> None:
        """Send a batch. A cancellation breaks the stream, and is raised once no memory is in use.

        Raises:
            StreamBroken: the stream ended before all was sent.
            StreamStalled: the peer does not read.
        """
        await self._move(self._send, batch)

    async def receive(self, batch: Batch) -> None:
        """Receive a batch; see `send`.

        Raises:
            ProtocolError: the stream brings another batch.
            ChecksumMismatch: bytes arrived changed.
        """
        await self._move(self._receive, batch)

    def abort(self) -> None:
        """Break the stream and its running batch at once; a held stream is closed when it is released. Safe twice."""
        if self.is_broken:
            return
        self.is_broken = True
        with contextlib.suppress(OSError):
            socket.socket.shutdown(
                self._socket, socket.SHUT_RDWR
            )  # TLS's would drop its state under the thread
        if not self.is_held:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._close()

    def _close(self) -> None:
        assert not self._is_moving, "a thread uses the socket"
        self._room.streams.discard(self)
        self._socket.close()

    def _arrived(self) -> None:
        """Handle the end of an idle stream; nothing else can arrive."""
        try:
            self._socket.recv(1)
        except (BlockingIOError, ssl.SSLWantReadError):  # TLS talks to itself, too
            return
        except OSError:
            pass
        self.abort()
        self._ended(self)

    async def _move(self, move: Callable[[Batch], None], batch: Batch) -> None:
        assert self.is_held, "held"
        assert not self._is_moving, "one batch at a time"
        if self.is_broken:
            raise StreamBroken("the stream has ended")
        self._is_moving = True
        moving = asyncio.get_running_loop().run_in_executor(self._room.executor, move, batch)
        try:
            await asyncio.shield(moving)
        except BaseException:
            self.abort()
            raise
        finally:
            await settled(moving)
            self._is_moving = False

    # -- on a thread ------------------------------------------------------------------------------------------------

    def _send(self, batch: Batch) -> None:
        header = np.frombuffer(batch.header(), np.uint8)
        checksums = np.frombuffer(batch.checksums(), np.uint8)
        addresses = np.concatenate(
            (_column(header.ctypes.data), batch.addresses, _column(checksums.ctypes.data))
        )
        lengths = np.concatenate((_column(header.size), batch.lengths, _column(checksums.size)))
        if isinstance(self._socket, ssl.SSLSocket):
            moved = send_ranges_tls(self._socket, addresses, lengths, idle_s=self._room.idle_s)
        else:
            moved = send_ranges(self._socket.fileno(), addresses, lengths, idle_s=self._room.idle_s)
        self._expect_done(moved, batch)

    def _receive(self, batch: Batch) -> None:
        header = np.empty(HEADER_BYTES, np.uint8)
        self._receive_into(batch, _column(header.ctypes.data), _column(header.size))
        batch.check_header(header.tobytes())
        checksums = np.empty(batch.checksums_bytes, np.uint8)
        self._receive_into(
            batch,
            np.append(batch.addresses, _column(checksums.ctypes.data)),
            np.append(batch.lengths, _column(checksums.size)),
        )
        batch.check(checksums.tobytes())

    def _receive_into(self, batch: Batch, addresses: OffsetArray, lengths: OffsetArray) -> None:
        if isinstance(self._socket, ssl.SSLSocket):
            moved = receive_ranges_tls(self._socket, addresses, lengths, idle_s=self._room.idle_s)
        else:
            moved = receive_ranges(self._socket.fileno(), addresses, lengths, idle_s=self._room.idle_s)
        self._expect_done(moved, batch)

    def _expect_done(self, moved: Streamed, batch: Batch) -> None:
        if moved.end is StreamEnd.DONE:
            return
        what = f"{moved.moved_bytes} bytes of {batch.num_bytes} and a header"
        if moved.end is StreamEnd.IDLE:
            raise StreamStalled(f"a stream moved {what}, then none for {self._room.idle_s:g} s")
        raise StreamBroken(
            f"a stream ended after {what}: {os.strerror(moved.errno) if moved.errno else 'closed'}"
        )


def _column(value: int) -> OffsetArray:
    return np.array([value], np.uint64)
