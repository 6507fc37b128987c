"""A disk under a slot file that fails, hangs, or flips bits of what it reads, as a test says."""

import errno
import os
import random
import threading
from collections.abc import Sequence
from typing import Literal

import numpy as np

_HANGS_S = 5.0

Mode = Literal["well", "flips", "fails", "hangs"]


class SickDisk:
    """Calls that hang end when the mode changes, or after `hangs_s`."""

    def __init__(self, rng: random.Random, block_bytes: int, *, hangs_s: float = _HANGS_S) -> None:
        self.rng = rng
        self.mode: Mode = "well"
        self.healed = threading.Event()
        self.hung = 0
        """Calls that have begun to hang."""
        self._block_bytes = block_bytes
        self._hangs_s = hangs_s

    def be(self, mode: Mode) -> None:
        self.healed.set()
        self.healed = threading.Event()
        self.mode = mode

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._suffer(errno.EIO)
        done = os.preadv(fd, buffers, offset)
        if self.mode == "flips":
            view = np.frombuffer(buffers[0], np.uint8)
            view[self.rng.randrange(min(len(view), self._block_bytes))] ^= 1 << self.rng.randrange(8)
        return done

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._suffer(errno.ENOSPC)
        return os.pwritev(fd, buffers, offset)

    def _suffer(self, number: int) -> None:
        if self.mode == "hangs":
            self.hung += 1
            self.healed.wait(self._hangs_s)
        if self.mode == "fails":
            raise OSError(number, os.strerror(number))
