"""Where blocks of a tier are that another host may read: in arrays, as workers send them to each other."""

import numpy as np
from numpy.typing import NDArray

LENT_BLOCK = np.dtype([("region", "<u4"), ("sum", "<u4"), ("offset", "<u8")])
"""The region that a block is in, the CRC-32C that its bytes had when it was stored, and where it begins, in bytes."""
LentBlocks = NDArray[np.void]
"""(n,) of `LENT_BLOCK`."""


def no_blocks() -> LentBlocks:
    """Return an empty list of blocks."""
    return np.zeros(0, LENT_BLOCK)
