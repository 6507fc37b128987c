"""How long a slot file of many blocks takes to open: its records are its index."""

import asyncio
import time
from pathlib import Path

import numpy as np

from penstock.kv.disk.data import ALIGNMENT
from penstock.kv.disk.records import SUFFIX
from penstock.kv.disk.slot_file import SlotFile
from penstock.kv.namespace import Namespace
from penstock.kv.records import RECORD, Records, seal

_NAMESPACE = Namespace(model_digest="bench", dtype="uint8", layout="bytes", block_size=16)
_CHAIN_BLOCKS = 64
_RECORDS_AT = 4096
"""The first record comes after a page."""


def opening_s(directory: Path, num_slots: int) -> float:
    """Make a slot file that is full by its records, and return the seconds until it is open again.

    Blocks are of 4 KiB, in chains of 64. Their bytes are never written: opening reads records alone.
    """
    path = directory / "full"
    size_bytes = num_slots * ALIGNMENT

    async def open_and_close(expected: int) -> float:
        began_s = time.perf_counter()
        slots = SlotFile(path, size_bytes, ALIGNMENT, _NAMESPACE)
        opened_s = time.perf_counter() - began_s
        kept = slots.num_cached
        await slots.close()
        assert kept == expected, f"{kept} of {expected} records were trusted"
        return opened_s

    asyncio.run(open_and_close(0))
    with path.with_name(path.name + SUFFIX).open("r+b") as file:
        file.seek(_RECORDS_AT)
        file.write(_records(num_slots).tobytes())
    seconds = asyncio.run(open_and_close(num_slots))
    path.unlink()
    return seconds


def _records(num_slots: int) -> Records:
    records = np.zeros(num_slots, RECORD)
    records["hash"] = np.random.default_rng(3).integers(1, 1 << 63, (num_slots, 2), dtype=np.uint64)
    records["namespace"] = np.frombuffer(_NAMESPACE.digest, "<u8")
    records["generation"] = np.arange(num_slots, 0, -1)
    records["parent"][1:] = records["hash"][:-1, 0]
    records["parent"][::_CHAIN_BLOCKS] = 0
    records["length"] = ALIGNMENT
    records["slot"] = np.arange(1, num_slots + 1)
    seal(records)
    return records
