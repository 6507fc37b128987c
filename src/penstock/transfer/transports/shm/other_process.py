"""Another process of this host: access to its memory by the kernel, its identity, and its end."""

import errno
import os
from pathlib import Path

import numpy as np

from penstock.core.descriptors import OffsetArray, TransferOp
from penstock.core.errors import PeerLost, TransferError
from penstock.transfer.regions.checksum import Sums, checksum_ranges
from penstock.transfer.regions.ranges import ProcessMemoryError, Stop, read_process, write_process

_EXITING = 4
"""PF_EXITING of Linux: the process is ending."""


class OtherProcess:
    """One side is in another process; the kernel copies."""

    def __init__(self, peer: str, pid: int, op: TransferOp) -> None:
        """Know the process and the direction."""
        self._peer = peer
        self._pid = pid
        self._op = op

    def copy(
        self, targets: OffsetArray, sources: OffsetArray, lengths: OffsetArray, threads: int, stop: Stop
    ) -> None:
        try:
            if self._op is TransferOp.READ:
                read_process(self._pid, targets, sources, lengths, threads, stop)
            else:
                write_process(self._pid, sources, targets, lengths, threads, stop)
        except ProcessMemoryError as error:
            if error.errno == errno.ECANCELED:
                return
            if error.errno == errno.ESRCH:
                raise PeerLost(f"agent {self._peer} is gone: its process {self._pid} has ended") from error
            raise TransferError(
                f"agent {self._peer}: {error}; memory has to stay as long as it is registered, and the kernel must permit"
                " access (same user, and kernel.yama.ptrace_scope 0 or CAP_SYS_PTRACE): else give an Arena"
            ) from error

    def copy_summed(
        self, targets: OffsetArray, sources: OffsetArray, lengths: OffsetArray, threads: int, stop: Stop
    ) -> Sums | None:
        """Copy, and sum the side that is in this process."""
        self.copy(targets, sources, lengths, threads, stop)
        if stop[0]:
            return None
        return checksum_ranges(targets if self._op is TransferOp.READ else sources, lengths)


def why_untraceable(pid: int, address: int, nonce: bytes) -> str | None:
    """Find out whether the kernel permits access to another process's memory, by reading its nonce.

    Returns:
        None if it does, else why not.
    """
    found = np.zeros(len(nonce), np.uint8)
    here, there, length = (np.array([value], np.uint64) for value in (found.ctypes.data, address, len(nonce)))
    try:
        read_process(pid, here, there, length)
    except ProcessMemoryError as error:
        return f"the kernel refuses to read memory of process {pid} ({os.strerror(error.errno or 0)})"
    return None if found.tobytes() == nonce else f"process {pid} is not that agent's"


def is_ending(pid: int) -> bool:
    """Say whether a process is ending or has ended; the kernel may still be freeing its memory."""
    try:
        status = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return True
    state, _, _, _, _, _, flags = status.rpartition(b") ")[2].split(maxsplit=7)[:7]
    return state in {b"Z", b"X"} or bool(int(flags) & _EXITING)
