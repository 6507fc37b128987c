"""LMCache's CPU and disk backends, for `python -m benchmarks kv-stores`: run by the Python that has lmcache.

    lmcache_stores.py DIRECTORY BLOCK_BYTES COUNT

The blocks of the device are a tensor in memory, as those of an engine on a CPU. A line of JSON in, one out: {"op": "host",
"seed": 1} gives {"store": seconds, "load": seconds} of COUNT blocks in random order: into memory of LMCache's and back, or
with {"op": "disk", "direct": true} into files of its own, one a block, and back. Each question stores new blocks.
"""

import asyncio
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_allocators.mixed_memory_allocator import MixedMemoryAllocator
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

_FILES_S = 100
_DISK_GIB = 1000  # its count of bytes does not fall when files are removed


class Stores:
    def __init__(self, directory: Path, block_bytes: int, count: int) -> None:
        self.directory = directory
        self.block_bytes, self.count = block_bytes, count
        self.device = torch.randint(0, 255, (count, 2, 1, 1, block_bytes // 2), dtype=torch.uint8)
        self.allocator = MixedMemoryAllocator(3 * count * block_bytes)
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.host = self.make_host(local_cpu=True)
        self.disks: dict[bool, LocalDiskBackend] = {}

    def make_host(self, **config: Any) -> LocalCPUBackend:
        return LocalCPUBackend(self.config(**config), dst_device="cpu", memory_allocator=self.allocator)

    def config(self, **config: Any) -> LMCacheEngineConfig:
        gib = 3 * self.count * self.block_bytes / 2**30
        return LMCacheEngineConfig.from_defaults(max_local_cpu_size=gib, **config)

    def keys(self, seed: int) -> list[CacheEngineKey]:
        return [
            CacheEngineKey("model", 1, 0, (seed << 32) + index, torch.uint8) for index in range(self.count)
        ]

    def allocate(self, host: LocalCPUBackend) -> Any:
        found = host.allocate(self.device.shape[1:], torch.uint8, MemoryFormat.KV_2LTD)
        assert found is not None
        return found

    def order(self, seed: int) -> list[int]:
        return torch.randperm(self.count, generator=torch.Generator().manual_seed(seed)).tolist()

    def measure_host(self, seed: int) -> dict[str, float]:
        keys = self.keys(seed)
        began_s = time.perf_counter()
        for key, block in zip(keys, self.order(seed), strict=True):
            memory = self.allocate(self.host)
            memory.tensor.copy_(self.device[block])
            self.host.submit_put_task(key, memory)
            memory.ref_count_down()
        stored_s = time.perf_counter()
        for key, block in zip(keys, self.order(seed + 1), strict=True):
            memory = self.host.get_blocking(key)
            assert memory is not None, "evicted before it was loaded"
            self.device[block].copy_(memory.tensor)
            memory.ref_count_down()
        loaded_s = time.perf_counter()
        self.host.clear()
        return {"store": stored_s - began_s, "load": loaded_s - stored_s}

    def measure_disk(self, seed: int, *, direct: bool) -> dict[str, float]:
        disk = self.disk(direct=direct)
        keys = self.keys(seed)
        written = threading.Semaphore(0)
        began_s = time.perf_counter()
        for key, block in zip(keys, self.order(seed), strict=True):
            memory = self.allocate(self.host)
            memory.tensor.copy_(self.device[block])
            disk.submit_put_task(key, memory, on_complete_callback=lambda _: written.release())
            memory.ref_count_down()
        for _ in keys:
            assert written.acquire(timeout=_FILES_S), "files were not written in time"
        stored_s = time.perf_counter()
        if not direct:
            for key in keys:
                forget(disk._key_to_path(key))
        dropped_s = time.perf_counter()
        for memory, block in zip(disk.batched_get_blocking(keys), self.order(seed + 1), strict=True):
            assert memory is not None, "a file is missing"
            self.device[block].copy_(memory.tensor)
            memory.ref_count_down()
        loaded_s = time.perf_counter()
        for key in keys:
            disk.remove(key)
        return {"store": stored_s - began_s, "load": loaded_s - dropped_s}

    def disk(self, *, direct: bool) -> LocalDiskBackend:
        if direct not in self.disks:
            config = self.config(
                local_cpu=False, local_disk=f"{self.directory}/direct-{direct}",
                max_local_disk_size=_DISK_GIB, extra_config={"use_odirect": direct},
            )  # fmt: skip
            self.disks[direct] = LocalDiskBackend(config, self.loop, self.host, dst_device="cpu")
        return self.disks[direct]


def forget(path: str) -> None:
    """Write a file out and drop it from the page cache, so that the disk is read and not memory."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def main(directory: str, block_bytes: str, count: str) -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # its log goes to stdout
    stores = Stores(Path(directory), int(block_bytes), int(count))
    print("{}", file=out, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["op"] == "host":
            answer = stores.measure_host(asked["seed"])
        else:
            answer = stores.measure_disk(asked["seed"], direct=asked["direct"])
        print(json.dumps(answer), file=out, flush=True)
    os._exit(0)  # its threads do not end


main(*sys.argv[1:])
