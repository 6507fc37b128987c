"""A fake `sglang.srt.mem_cache.hicache_storage`, and a host pool: the names, shapes and habits of SGLang 0.5.23 that a backend meets."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class HiCacheStorageConfig:
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    is_mla_model: bool = False
    model_name: str | None = None
    extra_config: dict[str, Any] | None = field(default_factory=dict)


@dataclass
class HiCacheStorageExtraInfo:
    prefix_keys: list[str] | None = None


class HiCacheStorage(ABC):
    mem_pool_host: Any

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host

    @abstractmethod
    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any: ...

    @abstractmethod
    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> Any: ...

    @abstractmethod
    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool: ...

    @abstractmethod
    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool: ...

    @abstractmethod
    def exists(self, key: str) -> bool: ...


class HostPool:
    """Keys and values of all layers, a page at a time; indices are those of tokens, as in SGLang."""

    def __init__(self, num_pages: int, page_size: int = 4, layout: str = "layer_first") -> None:
        self.page_size, self.layout, self.size = page_size, layout, num_pages * page_size
        self.kv_buffer = torch.zeros(2, 3, self.size, 2, 8, dtype=torch.bfloat16)

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros_like(self.kv_buffer[:, :, : self.page_size]).flatten()

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        page = self.kv_buffer[:, :, index : index + self.page_size]
        return page.flatten() if flat else page

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        target = self.kv_buffer[:, :, index : index + self.page_size]
        target.copy_(data_page.reshape(target.shape))
