"""A fake of TensorRT-LLM's `kv_cache_connector`: its interface of 1.1, and an executor that holds connectors to it."""

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import torch


@dataclass
class SchedulerOutput:
    new_requests: list[Any] = field(default_factory=list)
    cached_requests: list[Any] = field(default_factory=list)


class KvCacheConnectorWorker(ABC):
    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args
        self._metadata: object = None

    def bind_connector_meta(self, metadata: object) -> None:
        self._metadata = metadata

    def get_connector_meta(self) -> object:
        return self._metadata

    @abstractmethod
    def register_kv_caches(self, kv_cache_tensor: torch.Tensor) -> None: ...

    @abstractmethod
    def start_load_kv(self, stream: Any) -> None: ...

    @abstractmethod
    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None: ...

    @abstractmethod
    def save_kv_layer(self, layer_idx: int, stream: Any) -> None: ...

    @abstractmethod
    def wait_for_save(self, stream: Any) -> None: ...

    @abstractmethod
    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]: ...


class KvCacheConnectorScheduler(ABC):
    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args

    @abstractmethod
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> object: ...

    @abstractmethod
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]: ...

    @abstractmethod
    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool: ...

    @abstractmethod
    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None: ...


class Request:
    def __init__(self, request_id: int, tokens: list[int], **fields: Any) -> None:
        self.request_id, self._tokens = request_id, tokens
        self.lora_task_id = self.cache_salt_id = self.multimodal_hashes = None
        for name, value in fields.items():
            setattr(self, name, value)

    def get_tokens(self, beam: int) -> list[int]:
        assert beam == 0
        return self._tokens


class Executor:
    """Computes a block as a function of all tokens up to its end; reuses nothing on the device."""

    BLOCK = 4
    LAYERS = 2

    def __init__(self, scheduler_class: Any, worker_class: Any, num_blocks: int = 64, **args: Any) -> None:
        llm_args = SimpleNamespace(
            tensor_parallel_size=args.get("tensor_parallel_size", 1),
            pipeline_parallel_size=1,
            kv_cache_config=SimpleNamespace(tokens_per_block=self.BLOCK),
        )
        self.worker = worker_class(llm_args)
        self.scheduler = scheduler_class(llm_args)
        self.pool = torch.zeros(num_blocks, self.LAYERS, 2, 16, dtype=torch.float32)
        self.worker.register_kv_caches(self.pool)
        self._free = list(range(num_blocks))
        self.saving: dict[int, list[int]] = {}
        self._told: set[int] = set()
        self.computed_blocks = 0

    def content(self, tokens: list[int]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(hash(tuple(tokens)) % (1 << 31))
        return torch.randn(self.pool.shape[1:], generator=generator)

    def run(self, request: Request) -> int:
        """Run a request to its end; returns the tokens that the connector brought."""
        tokens = request.get_tokens(0)
        matched, is_async = self.scheduler.get_num_new_matched_tokens(request, 0)
        assert not (is_async and matched == 0), "TensorRT-LLM refuses this"
        assert not is_async, "this executor has no asynchronous loads"
        assert matched < len(tokens), "one token at least is computed"
        ids = [self._free.pop(0) for _ in range(-(-len(tokens) // self.BLOCK))]
        self.pool[ids] = 0
        self.scheduler.update_state_after_alloc(request, ids)
        self.worker.bind_connector_meta(self.scheduler.build_connector_meta(SchedulerOutput([request])))
        self.worker.start_load_kv(None)
        for layer in range(self.LAYERS):
            self.worker.wait_for_layer_load(layer, None)
            self.worker.save_kv_layer(layer, None)
        self.worker.wait_for_save(None)
        for number in range(len(tokens) // self.BLOCK):
            right = self.content(tokens[: (number + 1) * self.BLOCK])
            if number < matched // self.BLOCK:
                assert torch.equal(self.pool[ids[number]], right), (
                    "a promised block has arrived, and is right"
                )
            else:
                self.pool[ids[number]] = right
                self.computed_blocks += 1
        if self.scheduler.request_finished(request, ids):
            self.saving[request.request_id] = ids
        else:
            self._free += ids
        return int(matched)

    def settle(self) -> None:
        """Ask until all saves are over, for 30 s at most; only then are their blocks free."""
        until_s = perf_counter() + 30.0
        while perf_counter() < until_s:
            os.sched_yield()
            new = [request_id for request_id in self.saving if request_id not in self._told]
            self._told |= set(new)
            saved, loaded = self.worker.get_finished(new, [])
            assert set(saved) <= self._told
            assert not loaded
            for request_id in saved:
                self._told.discard(request_id)
                self._free += self.saving.pop(request_id)
            if not self.saving:
                return
        raise AssertionError(f"{len(self.saving)} requests are still being saved")
