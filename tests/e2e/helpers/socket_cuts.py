"""Cuts connections between two other processes by shutting down their sockets from outside."""

import ctypes
import errno
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

_PIDFD_GETFD = 438  # the same on all architectures
_UCRED = struct.Struct("3i")
_GONE = {errno.ENOENT, errno.EBADF, errno.ENOTCONN, errno.EINVAL}
"""Errors of a socket that was closed meanwhile or is not connected."""
_libc = ctypes.CDLL(None, use_errno=True)


def cut_between(one: int, other: int) -> int:
    """Shut down all stream sockets between two processes; returns their number. Needs to be their parent, or root."""
    with ExitStack() as stack:
        theirs = {peer for _, peer in _connections(other, stack)}
        shared = [end for end, _ in _connections(one, stack) if _leads_to(end, other, theirs)]
        for end in shared:
            with suppress(OSError):  # it has ended
                end.shutdown(socket.SHUT_RDWR)
        return len(shared)


def _leads_to(end: socket.socket, other: int, theirs: set[object]) -> bool:
    if end.family == socket.AF_UNIX:
        credentials = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        return bool(_UCRED.unpack(credentials)[0] == other)
    return end.getsockname() in theirs


def _connections(pid: int, stack: ExitStack) -> Iterator[tuple[socket.socket, object]]:
    """Yield (duplicate, peer) of a process's connected stream sockets; `stack` closes the duplicates."""
    process = os.pidfd_open(pid)
    stack.callback(os.close, process)
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if not str(link.readlink()).startswith("socket:"):
                continue
            end = stack.enter_context(socket.socket(fileno=_copied(process, int(link.name))))
            peer = end.getpeername()
        except OSError as error:
            if error.errno in _GONE:
                continue
            raise
        if end.type == socket.SOCK_STREAM:
            yield end, peer


def _copied(process: int, descriptor: int) -> int:
    copy = int(_libc.syscall(_PIDFD_GETFD, process, descriptor, 0))
    if copy < 0:
        raise OSError(ctypes.get_errno(), f"descriptor {descriptor} cannot be copied")
    return copy
