"""A probe of a host's memory: how fast blocks are copied and verified, before anything was loaded."""

from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from penstock.transfer.regions.checksum import copy_summed

_PIECES, _PIECE_BYTES = 4, 8 << 20
_THREADS = 2
"""As many as a load has."""


def probe_copies() -> float:
    """Measure bytes per second of copies with checksums, between two pieces of host memory."""
    memory = np.ones((2, _PIECES, _PIECE_BYTES), np.uint8)
    lengths: NDArray[np.uint64] = np.full(_PIECES, _PIECE_BYTES, np.uint64)
    begins = np.arange(_PIECES, dtype=np.uint64) * np.uint64(_PIECE_BYTES)
    targets, sources = (begins + np.uint64(half.ctypes.data) for half in memory)
    started_s = perf_counter()
    copy_summed(targets, sources, lengths, _THREADS)
    return _PIECES * _PIECE_BYTES / max(perf_counter() - started_s, 1e-9)
