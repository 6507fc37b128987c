"""The functions of `streams` for TLS, in Python."""

import ctypes
import ssl
from collections.abc import Callable

from penstock.core.descriptors import OffsetArray
from penstock.transfer.transports.tcp.streams import Streamed, StreamEnd

_CALL_BYTES = 1 << 20


def send_ranges_tls(
    stream: ssl.SSLSocket, addresses: OffsetArray, lengths: OffsetArray, *, idle_s: float
) -> Streamed:
    """Send ranges of memory; see `streams.send_ranges`. Blocks, and leaves the socket non-blocking."""
    return _move(stream, addresses, lengths, idle_s, stream.send)


def receive_ranges_tls(
    stream: ssl.SSLSocket, addresses: OffsetArray, lengths: OffsetArray, *, idle_s: float
) -> Streamed:
    """Receive into ranges of memory, and not one byte more; see `streams.receive_ranges`."""
    return _move(stream, addresses, lengths, idle_s, stream.recv_into)


def _move(
    stream: ssl.SSLSocket,
    addresses: OffsetArray,
    lengths: OffsetArray,
    idle_s: float,
    call: Callable[[memoryview], int],
) -> Streamed:
    moved = 0
    stream.settimeout(idle_s)
    try:
        for address, length in zip(addresses.tolist(), lengths.tolist(), strict=True):
            rest = memoryview((ctypes.c_uint8 * length).from_address(address)).cast("B")
            while len(rest):
                done = call(rest[:_CALL_BYTES])
                if done == 0:
                    return Streamed(moved, StreamEnd.CLOSED, 0)
                moved += done
                rest = rest[done:]
    except TimeoutError:
        return Streamed(moved, StreamEnd.IDLE, 0)
    except OSError as error:
        return Streamed(moved, StreamEnd.CLOSED, 0 if isinstance(error, ssl.SSLError) else error.errno or 0)
    finally:
        stream.setblocking(False)
    return Streamed(moved, StreamEnd.DONE, 0)
