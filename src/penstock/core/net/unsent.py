"""Bytes that a client has not taken yet."""

import asyncio
import contextlib
import fcntl
import sys
import termios

_INT_BYTES = 4


def unsent_bytes(transport: asyncio.WriteTransport | None) -> int:
    """Count unsent bytes in this process and in the kernel, which accepts more only in large parts; 0 once disconnected."""
    if transport is None:
        return 0
    sock = transport.get_extra_info("socket")
    in_kernel = bytearray(_INT_BYTES)
    with contextlib.suppress(OSError):  # disconnected
        fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, in_kernel)
    return transport.get_write_buffer_size() + int.from_bytes(in_kernel, sys.byteorder)
