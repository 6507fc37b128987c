"""A probe of a drive: how fast it reads slots, before anything was loaded from it."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from time import perf_counter

from penstock.transfer.storage.io_threads import Bounce
from penstock.transfer.storage.slots import Slots

PROBE_BYTES = 8 << 20
_TIMEOUT_S = 1.0
"""Of its writes, and of its reads."""


def probe_reads(data: Slots, slots: Sequence[int], threads: int, *, writes: bool) -> float | None:
    """Read slots by several threads; returns bytes per second: 0 if the drive failed, None if it hangs.

    Args:
        data: the open file.
        slots: to read; nobody else may use them if the result is None, since a thread may still hang in a write.
        threads: that read.
        writes: whether they are written first. Space that was only reserved is read without the drive.
    """
    pool = ThreadPoolExecutor(threads, "kv-disk-probe")
    seconds = 0.0
    try:
        for move in (data.write_data, data.read) if writes else (data.read,):
            begun_s = perf_counter()
            ended = wait(
                [pool.submit(move, slot, Bounce(data.slot_bytes).view) for slot in slots], _TIMEOUT_S
            )
            seconds = perf_counter() - begun_s
            if ended.not_done:
                return None
            if any(each.exception() for each in ended.done):
                return 0.0
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return len(slots) * data.slot_bytes / max(seconds, 1e-9)
