"""A disk under slot files that fails, hangs, or flips bits of what it reads, as a test says."""

import errno
import os
import random
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

_HANGS_S = 5.0
_ERRORS = {"preadv": errno.EIO, "pwritev": errno.ENOSPC, "fdatasync": errno.EIO}

Mode = Literal["well", "flips", "fails", "hangs"]


class SickDisk:
    """Calls that hang end when the mode changes, or after `hangs_s`.

    Attributes:
        errors: of calls that fail in any mode, by name.
        only: the one file that hangs; None for all.
        hanging: is released by each call that begins to hang.
        hung: calls that have begun to hang.
    """

    def __init__(
        self, rng: random.Random | None = None, block_bytes: int = 1 << 30, *, hangs_s: float = _HANGS_S
    ) -> None:
        self.rng = rng or random.Random(0)
        self.mode: Mode = "well"
        self.errors: dict[str, int] = {}
        self.only: Path | None = None
        self.healed = threading.Event()
        self.hanging = threading.Semaphore(0)
        self.hung = 0
        self._block_bytes = block_bytes
        self._hangs_s = hangs_s

    def be(self, mode: Mode) -> None:
        self.mode = mode
        self.healed.set()
        self.healed = threading.Event()

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._suffer("preadv", fd)
        done = os.preadv(fd, buffers, offset)
        if self.mode == "flips":
            view = np.frombuffer(buffers[0], np.uint8)
            view[self.rng.randrange(min(len(view), self._block_bytes))] ^= 1 << self.rng.randrange(8)
        return done

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._suffer("pwritev", fd)
        return os.pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        self._suffer("fdatasync", fd)
        os.fdatasync(fd)

    def _suffer(self, call: str, fd: int) -> None:
        healed = self.healed
        if self.mode == "hangs" and self.only in {None, Path(f"/proc/self/fd/{fd}").readlink()}:
            self.hung += 1
            self.hanging.release()
            healed.wait(self._hangs_s)
        number = _ERRORS[call] if self.mode == "fails" else self.errors.get(call, 0)
        if number:
            raise OSError(number, os.strerror(number))
