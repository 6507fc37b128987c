"""Penstock's KV tiers as TensorRT-LLM's KV cache connector: a scheduler's and a worker's class, which it imports itself.

TensorRT-LLM has no word for a load that failed: what was promised has to arrive. So blocks are loaded and verified in host memory
before the scheduler is told of them, and copied to the device before the forward pass. Both classes are in one process, so a model
has one device. Written for the interface of TensorRT-LLM 1.1; run with a stand-in for TensorRT-LLM alone.

Its settings are in the environment: `PENSTOCK_KV_CONNECTOR` is JSON, `{"kv": {"host": "8GiB"}, "model": DIRECTORY}`.
"""

import json
import os
from dataclasses import dataclass
from typing import Any

from tensorrt_llm._torch.pyexecutor.kv_cache_connector import (
    KvCacheConnectorScheduler,
    KvCacheConnectorWorker,
    SchedulerOutput,
)

from penstock.core.errors import ConfigError
from penstock.core.hashing import block_hashes
from penstock.core.types.events import Tier
from penstock.core.wire import HashArray
from penstock.engine.kv_tiers import KvConfig
from penstock.engine.kv_tiers.memory import HostMemory, TorchMemory
from penstock.engine.kv_tiers.staged import DeviceProcess, staged_tiers
from penstock.engine.weights_digest import weights_digest
from penstock.kv.connector.loads import Held
from penstock.kv.connector.orders import SaveOrder
from penstock.kv.connector.worker import KvConnectorWorker as Tiers

SETTINGS = "PENSTOCK_KV_CONNECTOR"
_STAGING_BYTES = 1 << 30
"""Half of it for loads: what all requests of a step can be promised."""


@dataclass(frozen=True, slots=True)
class _Put:
    """Held blocks that go to the device with the next forward pass."""

    held: Held
    block_ids: list[int]


class _Shared:
    """What the two classes of this process share: TensorRT-LLM makes each by itself."""

    tiers: Tiers | None = None
    saved: set[int]

    def __init__(self) -> None:
        self.saved = set()

    @property
    def open_tiers(self) -> Tiers:
        assert self.tiers is not None, "TensorRT-LLM registers its KV memory first"
        return self.tiers

    def ended(self) -> set[int]:
        """Return the requests whose blocks are read no more, of all those that were saved and not asked for."""
        report = self.open_tiers.take_report()
        self.saved |= set(report.saved) if report is not None else set()
        return self.saved


_SHARED = _Shared()


class PenstockScheduler(KvCacheConnectorScheduler):  # type: ignore[misc]
    """Promises what is already held in host memory."""

    def __init__(self, llm_args: Any) -> None:
        """Make it.

        Raises:
            ConfigError: the model has several devices.
        """
        super().__init__(llm_args)
        _check(llm_args)
        self._block_size: int = llm_args.kv_cache_config.tokens_per_block
        self._held: dict[int, tuple[Held, int]] = {}
        """By request of this step, its held blocks and how many the device has before them."""
        self._puts: list[_Put] = []

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        hashes = self._hashes(request)
        first = num_computed_tokens // self._block_size
        usable = hashes[first : max(first, (len(request.get_tokens(0)) - 1) // self._block_size)]
        self._forget(request.request_id)
        if num_computed_tokens % self._block_size or not len(usable):
            return 0, False
        held = _SHARED.open_tiers.hold(usable)
        if not held.slots:
            return 0, False
        self._held[request.request_id] = held, first
        return len(held.slots) * self._block_size, False

    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        held, first = self._held.pop(request.request_id, (None, 0))
        if held is not None:
            self._puts.append(_Put(held, list(block_ids[first : first + len(held.slots)])))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> list[_Put]:  # noqa: ARG002
        """Return the step's copies. A request that was promised blocks and has got none was cancelled between: they are let go.

        TensorRT-LLM asks for a request's matches and allocates its blocks in one step.
        """
        for request_id in list(self._held):
            self._forget(request_id)
        puts, self._puts = self._puts, []
        return puts

    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        """Save the complete blocks; whether there are any: TensorRT-LLM then keeps all until they are read."""
        self._forget(request.request_id)
        hashes = self._hashes(request)
        count = min((len(request.get_tokens(0)) - 1) // self._block_size, len(hashes), len(cache_block_ids))
        tiers = _SHARED.open_tiers
        if count < 1 or tiers.locate(hashes[:count]) == count:
            return False
        tiers.save(SaveOrder(request.request_id, hashes[:count], 0, list(cache_block_ids[:count])))
        return True

    def _forget(self, request_id: int) -> None:
        held, _ = self._held.pop(request_id, (None, 0))
        if held is not None:
            _SHARED.open_tiers.drop(held)

    def _hashes(self, request: Any) -> HashArray:
        """Hash a request's full blocks; equal prompts with other adapters or salts have other hashes."""
        salt = f"trtllm adapter={request.lora_task_id} salt={request.cache_salt_id}".encode()
        if request.multimodal_hashes:
            return block_hashes([], self._block_size)
        return block_hashes(request.get_tokens(0), self._block_size, salt)


class PenstockWorker(KvCacheConnectorWorker):  # type: ignore[misc]
    """Copies before the forward pass, and saves on threads of its own."""

    def __init__(self, llm_args: Any) -> None:
        """Read the settings.

        Raises:
            ConfigError: they are missing, or the model has several devices.
        """
        super().__init__(llm_args)
        _check(llm_args)
        try:
            settings = json.loads(os.environ.get(SETTINGS) or "{}")
        except ValueError:
            settings = None
        if not isinstance(settings, dict) or not {"kv", "model"} <= settings.keys():
            raise ConfigError(
                f'{SETTINGS}: must be JSON with kv and model, as {{"kv": {{"host": "8GiB"}}, "model": "./model"}}'
            )
        self._kv = KvConfig.parse(settings["kv"], source=f"{SETTINGS}: kv")
        outlives = self._kv.present().keys() & {Tier.DISK, Tier.OBJECT}
        self._digest = weights_digest(settings["model"]) if outlives else ""
        self._block_size: int = llm_args.kv_cache_config.tokens_per_block
        self._memory: Any = None
        self._asked: set[int] = set()

    def register_kv_caches(self, kv_cache_tensor: Any) -> None:
        """Open the tiers.

        Raises:
            ConfigError: a tier cannot be made, or a block is not one piece of memory.
        """
        num_blocks = int(kv_cache_tensor.shape[0])
        memory_type = HostMemory if kv_cache_tensor.device.type == "cpu" else TorchMemory
        memory = self._memory = memory_type({"all": kv_cache_tensor}, num_blocks)
        process = DeviceProcess(
            worker="trtllm",
            model_digest=self._digest,
            num_blocks=num_blocks,
            block_bytes=memory.block_bytes,
            block_size=self._block_size,
            content=f"trtllm {kv_cache_tensor.dtype} {tuple(kv_cache_tensor.shape[1:])}",
        )
        _SHARED.tiers = Tiers(
            lambda staging: staged_tiers(self._kv, process, staging), memory, staging_bytes=_STAGING_BYTES
        )

    def start_load_kv(self, stream: Any) -> None:  # noqa: ARG002 - complete when it returns
        self._memory.mark()
        for put in self.get_connector_meta() or ():
            _SHARED.open_tiers.put(put.held, put.block_ids)

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """Wait for nothing: all layers are there."""

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """Save nothing: whole blocks are saved when their request has ended."""

    def wait_for_save(self, stream: Any) -> None:
        """Wait for nothing: TensorRT-LLM keeps the blocks until `get_finished` names their request."""

    def get_finished(
        self,
        finished_gen_req_ids: list[int],
        started_loading_req_ids: list[int],  # noqa: ARG002 - none does
    ) -> tuple[list[int], list[int]]:
        self._asked |= set(finished_gen_req_ids)
        ended = sorted(_SHARED.ended() & self._asked)
        self._asked -= set(ended)
        _SHARED.saved -= set(ended)
        return ended, []


def _check(llm_args: Any) -> None:
    devices = llm_args.tensor_parallel_size * llm_args.pipeline_parallel_size
    if devices != 1:
        raise ConfigError(
            f"kv: a model on {devices} devices: a block has to be verified on all of them before TensorRT-LLM is told of it, which"
            " this version does on one only; leave kv_connector_config out"
        )
