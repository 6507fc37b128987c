"""Measures one transport between two memories."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import numpy as np

from penstock.doctor.memories import SIZE_BYTES, STORAGE_BYTES, STORAGE_KINDS
from penstock.transfer import Peer, PreparedTransfer, Registration, RemoteRegion, TransferAgent, TransferOp

_BLOCK_BYTES = 256 << 10
_SMALL_BYTES = 4096
_RUN_S = 0.1
"""Seconds of measurement per figure, after one warm-up run."""
_RUNS_MAX, _SMALL_RUNS_MAX = 5, 100
_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Figures:
    """Bandwidth and latency between two memories; GB are 10^9 bytes."""

    read_gb_per_s: float
    write_gb_per_s: float
    latency_us: float


async def measure(
    agent: TransferAgent, local: Registration, remote: Registration | RemoteRegion, peer: Peer | None
) -> Figures:
    """Measure reads and writes.

    Memory is moved in scattered blocks of 256 KiB, from the first half of one region to the second half of the other, so that
    both may be the same region. Storage is written and read sequentially.

    Raises:
        TransferRefused: the agent's transports do not support the pair.
        TransferError, DeadlineExceeded: a transfer failed.
    """
    if remote.info.kind in STORAGE_KINDS:
        large = agent.prepare(local.ranges(0, STORAGE_BYTES), remote.ranges(0, STORAGE_BYTES), peer)
        num_bytes = STORAGE_BYTES
    else:
        count = SIZE_BYTES // _BLOCK_BYTES // 2
        order = np.random.default_rng(1).permutation(count)
        large = agent.prepare(
            local.blocks(np.arange(count), _BLOCK_BYTES), remote.blocks(count + order, _BLOCK_BYTES), peer
        )
        num_bytes = count * _BLOCK_BYTES
    far = remote.info.size_bytes - _SMALL_BYTES
    small = agent.prepare(local.ranges(0, _SMALL_BYTES), remote.ranges(far, _SMALL_BYTES), peer)
    write_s = await _seconds(_posting(large, TransferOp.WRITE), _RUNS_MAX)
    read_s = await _seconds(_posting(large, TransferOp.READ), _RUNS_MAX)
    small_s = await _seconds(_posting(small, TransferOp.READ), _SMALL_RUNS_MAX)
    return Figures(num_bytes / read_s / 1e9, num_bytes / write_s / 1e9, small_s * 1e6)


def _posting(prepared: PreparedTransfer, op: TransferOp) -> Callable[[], Awaitable[None]]:
    return lambda: prepared.post(op, timeout_s=_TIMEOUT_S).wait()


async def _seconds(run: Callable[[], Awaitable[None]], runs_max: int) -> float:
    """Give the median seconds of several runs."""
    await run()
    took: list[float] = []
    while len(took) < runs_max and sum(took) < _RUN_S:
        began_s = perf_counter()
        await run()
        took.append(perf_counter() - began_s)
    return median(took)
