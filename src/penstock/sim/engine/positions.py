"""The tokens of a simulated answer: each is its position."""

from functools import lru_cache

import numpy as np


@lru_cache(maxsize=1)
def packed_positions(end: int) -> bytes:
    """Pack the numbers below `end`; cut from here, an answer costs no array of its own."""
    return np.arange(end, dtype="<i4").tobytes()
