import numpy as np
from numpy.typing import NDArray

implementation: str
"""The instruction set that `block_hashes` uses here: avx512, avx2 or portable."""

def block_hashes(
    tokens: NDArray[np.int32], block_size: int, first: tuple[int, int], extra: dict[int, bytes], key: bytes
) -> NDArray[np.uint64]: ...
def siphash128(data: bytes, key: bytes) -> tuple[int, int]: ...
def decode_attention(
    query: NDArray[np.float32] | NDArray[np.uint16],
    storage: NDArray[np.float32] | NDArray[np.uint16],
    layer: int,
    tables: NDArray[np.int32],
    lengths: NDArray[np.int64],
    out: NDArray[np.float32] | NDArray[np.uint16],
    window: int,
    scale: float,
    softcap: float,
) -> None: ...
