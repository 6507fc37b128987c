"""A pool of memory and an agent with one transport, for both processes of this bench."""

import numpy as np

from benchmarks.transfer.shapes import POOL_BYTES
from penstock.transfer import Arena, TransferConfig


def make_pool(memory: str) -> object:
    """Take the pool's memory: an arena, or private memory that is touched."""
    return Arena.create(POOL_BYTES) if memory == "shared" else np.ones(POOL_BYTES, np.uint8)


def config_for(transport: str, listen: str) -> TransferConfig:
    return TransferConfig(listen=(listen,), transports=(transport,), heartbeat_timeout_s=30)
