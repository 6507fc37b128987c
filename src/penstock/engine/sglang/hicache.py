"""Penstock's KV tiers as a storage backend of SGLang's HiCache: below its device and host pools.

SGLang imports this in its own processes, by `--hicache-storage-backend dynamic`. Its threads ask and wait; batches go on meanwhile.
Pages keep SGLang's hashes, which it chains from the start of a prompt. Written for the interface of SGLang 0.5.23; run with a
stand-in for SGLang alone.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from penstock.core.errors import ConfigError
from penstock.core.log import get_logger
from penstock.core.wire import HashArray
from penstock.engine.kv_tiers import KvConfig
from penstock.engine.kv_tiers.staged import DeviceProcess, staged_tiers
from penstock.engine.weights_digest import weights_digest
from penstock.kv.connector.orders import Orders, SaveOrder
from penstock.kv.connector.worker import KvConnectorWorker
from penstock.kv.device_blocks import DeviceBlocks

_HASH_DIGITS = 32
_WAIT_S = 30.0


class HostPool:
    """SGLang's pool in host memory as `DeviceMemory`; a block is a page, named by the index of its first token."""

    def __init__(self, pool: Any) -> None:
        dummy = pool.get_dummy_flat_data_page()
        self._pool = pool
        self._dtype = dummy.dtype
        self.block_bytes = int(dummy.numel() * dummy.element_size())

    def read(self, block_ids: Sequence[int], slots: DeviceBlocks, slot_ids: Sequence[int]) -> None:
        """Copy pages to slots."""
        for view, index in zip(slots.views(slot_ids), block_ids, strict=True):
            page = self._pool.get_data_page(index, flat=True)
            torch.from_numpy(view).copy_(page.contiguous().view(torch.uint8))

    def write(self, block_ids: Sequence[int], slots: DeviceBlocks, slot_ids: Sequence[int]) -> None:
        """Copy slots to pages."""
        for view, index in zip(slots.views(slot_ids), block_ids, strict=True):
            self._pool.set_from_flat_data_page(index, torch.from_numpy(view).view(self._dtype))


class PenstockStorage(HiCacheStorage):  # type: ignore[misc]
    """One process's part of the pages. Needs `interface_v1` in SGLang's extra configuration."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:  # noqa: ARG002 - SGLang's signature
        """Check the configuration; `register_mem_pool_host` opens the tiers.

        Args:
            storage_config: SGLang's, whose `extra_config` has `kv` (as a role of the graph), `model` (the directory with the
                weights), and `worker` (a name; its file on a disk ends with it).
            kwargs: SGLang's, not used.

        Raises:
            ConfigError: a setting is missing or wrong.
        """
        extra = storage_config.extra_config or {}
        missing = [name for name in ("kv", "model", "interface_v1") if not extra.get(name)]
        if missing:
            raise ConfigError(
                f"hicache_storage_backend_extra_config: {' and '.join(missing)} missing; expected kv, model and interface_v1: 1"
            )
        if storage_config.is_mla_model and storage_config.tp_size > 1:
            raise ConfigError(
                f"hicache storage: an MLA model on {storage_config.tp_size} devices has one writer, and tiers belong to one"
                " process each; use one device, or leave the storage backend out"
            )
        self._config = storage_config
        self._kv = KvConfig.parse(extra["kv"], source="hicache_storage_backend_extra_config: kv")
        self._worker = str(extra.get("worker", "sglang"))
        self._digest = weights_digest(extra["model"])
        self._side: KvConnectorWorker | None = None
        self._next_id = 0

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Open the tiers below SGLang's pool in host memory.

        Raises:
            ConfigError: a tier cannot be made.
        """
        super().register_mem_pool_host(mem_pool_host)
        memory = HostPool(mem_pool_host)
        process = DeviceProcess(
            worker=self._worker,
            model_digest=self._digest,
            num_blocks=mem_pool_host.size // mem_pool_host.page_size,
            block_bytes=memory.block_bytes,
            block_size=mem_pool_host.page_size,
            content=f"sglang {mem_pool_host.layout} {memory._dtype} rank {self._number} of {self._processes}",
            number=self._number,
            processes=self._processes,
        )
        self._page_size = mem_pool_host.page_size
        self._side = KvConnectorWorker(lambda staging: staged_tiers(self._kv, process, staging), memory)

    @property
    def _processes(self) -> int:
        return int(self._config.tp_size * self._config.pp_size)

    @property
    def _number(self) -> int:
        return int(self._config.pp_rank * self._config.tp_size + self._config.tp_rank)

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:  # noqa: ARG002
        """Count the leading pages that a tier keeps."""
        return self._open.locate(_hashes(keys))

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) > 0

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:  # noqa: ARG002
        """Load pages into SGLang's pool; the first that is missing or does not match ends it."""
        arrived = self._open.load_now(_hashes(keys), self._pages(host_indices))
        self._open.take_report()  # nobody else reads events here
        return [index < arrived for index in range(len(keys))]

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:  # noqa: ARG002
        """Copy pages from SGLang's pool; they may change when it returns, so it waits as long as they are read.

        What comes before `keys` may be in SGLang's own pool alone, and is not asked for.
        """
        self._next_id += 1
        side = self._open
        side.save(SaveOrder(self._next_id, _hashes(keys), 0, self._pages(host_indices)))
        while not side.wait(_WAIT_S):
            get_logger().warning(
                "kv_save_slow", waited_s=_WAIT_S, effect="SGLang's storage thread goes on waiting"
            )
        side.take_report()
        return [True] * len(keys)

    def clear(self) -> None:
        """Forget all pages."""
        self._open.submit(Orders(is_clearing=True))
        self._open.wait(_WAIT_S)

    def close(self) -> None:
        """Close the tiers; SGLang calls it when it detaches the storage."""
        if self._side is not None:
            self._side.close()

    # -- SGLang's older interface, which copies every page through a tensor: `interface_v1` replaces it

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        raise NotImplementedError("set interface_v1: 1 in hicache_storage_backend_extra_config")

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> None:
        raise NotImplementedError("set interface_v1: 1 in hicache_storage_backend_extra_config")

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        raise NotImplementedError("set interface_v1: 1 in hicache_storage_backend_extra_config")

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        raise NotImplementedError("set interface_v1: 1 in hicache_storage_backend_extra_config")

    @property
    def _open(self) -> KvConnectorWorker:
        assert self._side is not None, "SGLang registers its pool first"
        return self._side

    def _pages(self, host_indices: Any) -> list[int]:
        """Return the index of each page's first token."""
        return [int(index) for index in host_indices[:: self._page_size].tolist()]


def _hashes(keys: Sequence[str]) -> HashArray:
    """Take the first 128 bits of SGLang's SHA-256 of each page and all before it."""
    packed = b"".join(bytes.fromhex(key[:_HASH_DIGITS]) for key in keys)
    return np.frombuffer(packed, "<u8").reshape(-1, 2)
