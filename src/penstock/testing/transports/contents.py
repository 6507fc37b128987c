"""Memory contents of both sides of a transport's harness before a transfer."""

import numpy as np

from penstock.testing.transports.harness import Bytes, TransportHarness


async def differ(harness: TransportHarness) -> None:
    """Fill both sides so that they differ in every byte, and every byte that moves is seen."""
    size = harness.local.region.size_bytes
    harness.write_local(np.full(size, 1, np.uint8))
    await harness.write_remote(np.full(size, 2, np.uint8))


async def fill(harness: TransportHarness, seed: int) -> tuple[Bytes, Bytes]:
    """Put random bytes on both sides; return copies."""
    random = np.random.default_rng(seed)
    size = harness.local.region.size_bytes
    here = random.integers(0, 256, size, np.uint8)
    there = random.integers(0, 256, size, np.uint8)
    harness.write_local(here)
    await harness.write_remote(there)
    return here, there
