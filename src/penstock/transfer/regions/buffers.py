"""Regions of numpy arrays, torch tensors, arenas and buffers."""

import sys
from typing import Any

import numpy as np

from penstock.core.descriptors import MemoryKind, Region
from penstock.core.errors import TransferRefused
from penstock.transfer.regions.arena import Arena


def region_of(memory: object, name: str = "") -> Region:
    """Describe memory as a region, which keeps the memory alive.

    Args:
        memory: an `Arena`, a contiguous numpy array or torch tensor, or any object with a contiguous buffer.
        name: its name at peers.

    Raises:
        TransferRefused: it is no such thing, or not contiguous, or empty.
    """
    if isinstance(memory, Arena):
        return Region(
            kind=MemoryKind.SHARED,
            size_bytes=memory.size_bytes,
            name=name,
            address=memory.address,
            owner=(memory, memory.array),  # the array keeps the mapping should the arena be closed
            writable=memory.array.flags.writeable,
        )
    torch = sys.modules.get("torch")  # a tensor cannot be there unless its owner has imported torch
    if torch is not None and isinstance(memory, torch.Tensor):
        return _of_tensor(memory, name)
    try:
        view = memoryview(memory)  # type: ignore[arg-type]
    except TypeError as error:
        raise TransferRefused(
            f"{type(memory).__name__} has no memory to register: give a numpy array, a torch tensor, an object with a"
            " buffer, or a Region"
        ) from error
    if not view.c_contiguous or view.nbytes == 0:
        raise TransferRefused(
            f"{type(memory).__name__} of {view.nbytes} bytes, shape {view.shape}, strides {view.strides}: must be"
            " contiguous and not empty; register what it is a view of"
        )
    flat = np.frombuffer(view.cast("B") if view.ndim else view, np.uint8)
    return Region(
        kind=MemoryKind.DRAM,
        size_bytes=view.nbytes,
        name=name,
        address=flat.ctypes.data,
        owner=(memory, flat),
        writable=not view.readonly,
    )


def _of_tensor(tensor: Any, name: str) -> Region:
    size_bytes = tensor.numel() * tensor.element_size()
    if not tensor.is_contiguous() or size_bytes == 0:
        raise TransferRefused(
            f"tensor of shape {tuple(tensor.shape)}, strides {tensor.stride()}: must be contiguous and not empty;"
            " register what it is a view of"
        )
    if tensor.device.type not in {"cpu", "cuda"}:
        raise TransferRefused(f"tensor on {tensor.device}: only memory of cpu and cuda can be registered")
    return Region(
        kind=MemoryKind.VRAM if tensor.is_cuda else MemoryKind.DRAM,
        size_bytes=size_bytes,
        name=name,
        address=tensor.data_ptr(),
        owner=tensor,
        device=tensor.device.index or 0,
    )
