"""The names of the blocks that a prompt's KV transfer moves."""

import numpy as np

from penstock.core.wire import HashArray
from penstock.seams import KvBlocks, KvGrouped, KvNames


def names_of(engine: KvBlocks, block_hashes: HashArray) -> KvNames:
    """Name the blocks that an engine needs of a prompt with these full blocks, (n, 2) uint64."""
    if isinstance(engine, KvGrouped):
        return engine.kv_names(block_hashes)
    return KvNames(block_hashes, np.zeros(0, np.uint64), len(block_hashes))
