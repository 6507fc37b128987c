"""Token ids of simulated outputs: each id is its position."""

from functools import lru_cache

import numpy as np


@lru_cache(maxsize=1)
def packed_positions(end: int) -> bytes:
    """Pack 0 .. end - 1 as int32; outputs are slices of it and need no array of their own."""
    return np.arange(end, dtype="<i4").tobytes()
