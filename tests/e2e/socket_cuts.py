"""Cuts connections between two other processes: what they are connected by is shut down under their hands."""

import ctypes
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

_PIDFD_GETFD = 438  # the same on all architectures
_UCRED = struct.Struct("3i")
_libc = ctypes.CDLL(None, use_errno=True)


def cut_between(one: int, other: int) -> int:
    """Shut down all stream sockets that connect two processes; give how many. Their parent may do that, and root."""
    with ExitStack() as stack:
        ours = [stack.enter_context(end) for end in _streams_of(one)]
        theirs = {
            end.getpeername()
            for end in map(stack.enter_context, _streams_of(other))
            if end.family != socket.AF_UNIX
        }
        shared = [end for end in ours if _is_shared(end, other, theirs)]
        for end in shared:
            end.shutdown(socket.SHUT_RDWR)
        return len(shared)


def _is_shared(end: socket.socket, other: int, theirs: set[object]) -> bool:
    if end.family == socket.AF_UNIX:
        credentials = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        return bool(_UCRED.unpack(credentials)[0] == other)
    return end.getsockname() in theirs


def _streams_of(pid: int) -> Iterator[socket.socket]:
    """Give copies of a process's connected stream sockets."""
    process = os.pidfd_open(pid)
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                is_socket = os.readlink(link).startswith("socket:")
            except FileNotFoundError:  # closed by now
                continue
            copy = _libc.syscall(_PIDFD_GETFD, process, int(link.name), 0) if is_socket else -1
            if is_socket and copy < 0:
                if ctypes.get_errno() == 9:  # closed by now
                    continue
                raise OSError(ctypes.get_errno(), f"socket {link.name} of process {pid} cannot be copied")
            if is_socket:
                end = socket.socket(fileno=copy)
                if end.type == socket.SOCK_STREAM and _is_connected(end):
                    yield end
                else:
                    end.close()
    finally:
        os.close(process)


def _is_connected(end: socket.socket) -> bool:
    try:
        end.getpeername()
    except OSError:
        return False
    return True
