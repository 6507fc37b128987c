"""Measure how fast one thread copies memory: the limit of KV transfers on one host."""

import ctypes
import statistics
import time

import numpy as np

_REPEATS = 9


def memcpy_bytes_per_s(num_bytes: int) -> float:
    """Copy `num_bytes` several times, and give the median speed."""
    source, target = (np.ones(num_bytes, np.uint8) for _ in range(2))
    copy = ctypes.CDLL(None).memcpy
    copy.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_size_t)
    seconds = []
    for _ in range(_REPEATS):
        began_s = time.perf_counter()
        copy(target.ctypes.data, source.ctypes.data, num_bytes)
        seconds.append(time.perf_counter() - began_s)
    return num_bytes / statistics.median(seconds)
