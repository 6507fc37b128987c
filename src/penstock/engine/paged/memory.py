"""The paged engine's settings, KV memory, fences and cores.

KV memory is block-first: all layers of a block are one contiguous slab to copy or send. On a CPU it is an arena of
`penstock.transfer`: other processes of the host map it and copy blocks from and to it directly.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import pydantic
import torch

from penstock.core.config import Config
from penstock.core.errors import ConfigError, TransferError
from penstock.core.types.kv import KvLayout
from penstock.transfer import Arena
from penstock.transfer.regions import arena

_CPU_DEFAULT_BYTES = 1 << 30
_GPU_DEFAULT_FRACTION = 0.85
_SPARE_BLOCKS = 1


@dataclass(frozen=True, slots=True)
class KvShape:
    """Shape of one token's keys and values, equal in all layers.

    Attributes:
        num_layers: layers that a block has; all of the model's, unless groups of them have blocks of their own.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def block_bytes(self, block_size: int) -> int:
        elements = self.num_layers * 2 * block_size * self.num_kv_heads * self.head_dim
        return elements * int(self.dtype.itemsize)


class KvMemory:
    """`num_blocks` slabs of [num_layers, 2, block_size, num_kv_heads, head_dim], and a spare one.

    Padding tokens write to the spare block. Memory starts as zeros: attention multiplies masked values by zero, so they
    must not be NaN.
    """

    def __init__(
        self,
        shape: KvShape,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        places: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Allocate and commit all memory now, so that no later prompt finds the machine out of memory.

        Args:
            shape: of a token, in as many layers as a block has.
            num_blocks: size.
            block_size: tokens in a block.
            device: where the memory is.
            places: by layer of the model, its block table and its place in a block; empty: all layers in one table, in order.

        Raises:
            ConfigError: there is not enough memory.
        """
        self.shape = shape
        self.places = tuple(places) or tuple((0, layer) for layer in range(shape.num_layers))
        """By layer of the model: its block table, and its place in a block of it."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.spare_block = num_blocks
        self.device = device
        sizes = (
            num_blocks + _SPARE_BLOCKS, shape.num_layers, 2, block_size, shape.num_kv_heads, shape.head_dim,
        )  # fmt: skip
        self._arena = _allocate(shape.block_bytes(block_size), num_blocks) if device.type == "cpu" else None
        if self._arena is None:
            self.storage = torch.zeros(sizes, dtype=shape.dtype, device=device)
        else:
            self.storage = torch.frombuffer(self._arena.array, dtype=shape.dtype).view(sizes)
        self.layout = KvLayout(
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=str(shape.dtype).removeprefix("torch."),
            element_bytes=int(shape.dtype.itemsize),
            block_size=block_size,
        ).split(num_blocks=num_blocks)
        """For other workers."""
        tokens = [self.storage.select(1, layer) for layer in range(shape.num_layers)]
        self.by_token = [(kv[:, 0], kv[:, 1]) for kv in tokens]
        """By place: views of keys and values, (num_blocks + 1, block_size, num_kv_heads, head_dim) each."""
        self.by_block = [(keys.flatten(1), values.flatten(1)) for keys, values in self.by_token]
        """By place: the same as (num_blocks + 1, a block's elements), to gather whole blocks."""

    def close(self) -> None:
        """Release the memory; mappings of other processes stay valid until they unmap. Safe twice."""
        if self._arena is not None:
            self._arena.close()


class Gather:
    """Gathers blocks into reused memory: allocating memory for each call costs ten times the copy."""

    def __init__(self, memory: KvMemory) -> None:
        self.memory = memory
        self._scratch = memory.storage.new_empty(2, 0, 0)

    def __call__(self, place: int, block_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of the blocks, (n, a block's elements) each; valid until the next call."""
        keys, values = self.memory.by_block[place]
        count = len(block_ids)
        if count > self._scratch.shape[1]:
            self._scratch = keys.new_empty(2, count, keys.shape[1])
        to_keys, to_values = self._scratch[0, :count], self._scratch[1, :count]
        torch.index_select(keys, 0, block_ids, out=to_keys)
        torch.index_select(values, 0, block_ids, out=to_values)
        return to_keys, to_values


def plan_blocks(
    block_bytes: int,
    *,
    kv_blocks: int | None,
    kv_memory_bytes: int | None,
    device: torch.device,
    sharing_engines: int = 1,
) -> int:
    """Decide how many KV blocks to allocate.

    Args:
        block_bytes: size of one block.
        kv_blocks: number configured; None: as many as fit.
        kv_memory_bytes: memory for blocks if `kv_blocks` is None; None: a share of the free memory.
        device: where the blocks are.
        sharing_engines: engines that allocate there at the same time.

    Raises:
        ConfigError: the blocks do not fit into memory, or the memory allowed holds fewer than two.
    """
    free_bytes = free_memory_bytes(device)
    if kv_blocks is None:
        budget = kv_memory_bytes or _default_budget(device, free_bytes // sharing_engines)
        if budget < 2 * block_bytes:
            raise ConfigError(
                f"kv_memory_bytes: {budget} hold fewer than two KV blocks of {block_bytes} bytes;"
                " raise it, or lower block_size"
            )
        kv_blocks = budget // block_bytes
    needed = (kv_blocks + _SPARE_BLOCKS) * block_bytes
    if needed > free_bytes:
        fits = max(0, free_bytes // block_bytes - _SPARE_BLOCKS)
        raise ConfigError(
            f"kv_blocks: {kv_blocks} blocks of {block_bytes} bytes need {needed / 2**30:.1f} GiB,"
            f" {device} has {free_bytes / 2**30:.1f} GiB free; at most {fits} fit"
        )
    return kv_blocks


def free_memory_bytes(device: torch.device) -> int:
    """Return the free memory of the GPU, or of this machine within the limit of its control group."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return arena.free_memory_bytes()


def _allocate(block_bytes: int, num_blocks: int) -> Arena:
    """Allocate shared memory for all blocks.

    Raises:
        ConfigError: there is not enough, or other processes took it meanwhile.
    """
    size_bytes = (num_blocks + _SPARE_BLOCKS) * block_bytes
    host = torch.device("cpu")

    def check(lacking_bytes: int) -> None:
        free_bytes = free_memory_bytes(host)
        if free_bytes < lacking_bytes:
            raise ConfigError(
                f"kv_blocks: {num_blocks} blocks of {block_bytes} bytes: {lacking_bytes / 2**30:.2f} of"
                f" {size_bytes / 2**30:.2f} GiB are still to be taken, and other processes have left {free_bytes / 2**30:.2f};"
                " lower kv_blocks, or free memory"
            )

    try:
        return Arena.create(size_bytes, before_taking=check)
    except TransferError as error:
        raise ConfigError(
            f"kv_blocks: {num_blocks} blocks of {block_bytes} bytes: {error.message}"
        ) from error


def _default_budget(device: torch.device, free_bytes: int) -> int:
    if device.type == "cuda":
        return int(free_bytes * _GPU_DEFAULT_FRACTION)
    return min(_CPU_DEFAULT_BYTES, free_bytes // 2)


class Fence(Protocol):
    """Waits for the work queued on one device. Used on the thread that queues it."""

    def wait(self) -> None:
        """Return once all queued work is done and its writes are visible to every reader."""
        ...


class HostFence:
    """For a CPU, where calls return when they are done."""

    def wait(self) -> None:
        """Return at once."""


class CudaFence:
    """For a CUDA device, where kernels are queued: nothing else waits for a step that samples no token."""

    def __init__(self, device: torch.device) -> None:
        """Make a blocking event: the waiting thread sleeps instead of spinning on its core."""
        self._device = device
        self._event = torch.cuda.Event(blocking=True)

    def wait(self) -> None:
        self._event.record(torch.cuda.current_stream(self._device))
        self._event.synchronize()


def make_fence(device: torch.device) -> Fence:
    return CudaFence(device) if device.type == "cuda" else HostFence()


def keep_to_cores(device: str, threads: int) -> None:
    """Pin the calling thread, and threads it starts, to the cores that `device` names.

    Without it the kernel moves compute threads between cores whenever other threads wake up, and caches are cold after each move.
    Measured with a decode worker and a prefill worker on two EPYC cores, 20 small layers: the median decode step is 9.1 ms instead of
    10.2 with other programs running, and 9.9 instead of 10.1 without.

    Args:
        device: `cpu:N` names `threads` cores from core N on; other devices name none.
        threads: number of cores.

    Raises:
        ConfigError: this process may not use these cores, or the system cannot pin threads.
    """
    kind, _, number = device.partition(":")
    if kind != "cpu" or not number:
        return
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError(f"device: {device}: this system keeps no thread to a core; use cpu")
    cores, usable = range(int(number), int(number) + threads), os.sched_getaffinity(0)
    missing = sorted(set(cores) - usable)
    if missing:
        raise ConfigError(
            f"device: {device}: with {threads} {'thread' if threads == 1 else 'threads'} it needs"
            f" {_listed(missing)}, and this process may use {_listed(sorted(usable))}; name others, or use cpu"
        )
    os.sched_setaffinity(0, cores)


def _listed(cores: list[int]) -> str:
    return f"{'core' if len(cores) == 1 else 'cores'} {', '.join(map(str, cores))}"


Dtype = Literal["auto", "float32", "bfloat16", "float16"]


class PagedConfig(Config):
    model: str = pydantic.Field(min_length=1)
    """A directory with a checkpoint, or a name on the Hugging Face hub."""
    device: str = pydantic.Field(default="cpu", pattern=r"^(cpu|cuda)(:\d+)?$")
    """Where the model computes: cpu, cuda or cuda:N; cpu:N keeps its threads to core N, and those after it with more `threads`."""
    dtype: Dtype = "auto"
    """Number format of weights and KV; auto is the checkpoint's own."""
    block_size: int = pydantic.Field(default=16, ge=1, le=1024)
    """Tokens in a KV block."""
    kv_blocks: int | None = pydantic.Field(default=None, ge=2)
    """KV blocks to keep; None is as many as `kv_memory_bytes` holds."""
    kv_memory_bytes: int | None = pydantic.Field(default=None, ge=1)
    """Memory for KV blocks where `kv_blocks` is not given; None is 1 GiB on a CPU and 85 % of what is free on a GPU."""
    sharing_engines: int = pydantic.Field(default=1, ge=1)
    """Engines that take their memory from this machine at the same time, this one included; only the default of `kv_memory_bytes` depends on it."""
    context_length: int | None = pydantic.Field(default=None, ge=1)
    """Tokens a request may have, prompt and output; None is the model's own limit."""
    eos_token_ids: tuple[int, ...] = ()
    """End-of-sequence tokens beside those that the checkpoint names."""
    threads: int = pydantic.Field(default=1, ge=1)
    """CPU threads of one step. More than the cores that are free makes steps many times slower."""
    window_tables: bool = True
    """Whether layers with a sliding window keep the blocks of their window alone, in block tables of their own, where a request of
    `context_length` tokens then takes less memory. Such an engine takes no part in KV transfers."""
