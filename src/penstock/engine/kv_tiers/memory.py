"""An engine's KV memory in a device process: how blocks of all layers are copied to and from slots in host memory."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import ConfigError
from penstock.kv.device_blocks import DeviceBlocks
from penstock.transfer.regions.ranges import copy_ranges


class HostMemory:
    """KV memory of a CPU: pieces of blocks, one in each layer, are copied by address."""

    def __init__(self, layers: Mapping[str, Any], num_blocks: int) -> None:
        """Find the blocks.

        Args:
            layers: torch tensors by layer, whose first dimension is the block.
            num_blocks: of the engine.

        Raises:
            ConfigError: a block of a layer is not one piece of memory.
        """
        tensors = list(_distinct(layers).values())
        self._owners = tensors
        self._addresses = np.array([tensor.data_ptr() for tensor in tensors], np.uint64)
        self._piece_bytes = np.array([piece_bytes(tensor, num_blocks) for tensor in tensors], np.uint64)
        self._offsets = np.concatenate([np.zeros(1, np.uint64), np.cumsum(self._piece_bytes)[:-1]])
        self.block_bytes = int(self._piece_bytes.sum())

    def mark(self) -> None:
        """Do nothing: what a step wrote is there when it returns."""

    def read(self, block_ids: Sequence[int], slots: DeviceBlocks, slot_ids: Sequence[int]) -> None:
        """Copy blocks to slots."""
        copy_ranges(self._slots(slots, slot_ids), self._blocks(block_ids), self._lengths(len(block_ids)))

    def write(self, block_ids: Sequence[int], slots: DeviceBlocks, slot_ids: Sequence[int]) -> None:
        """Copy slots to blocks."""
        copy_ranges(self._blocks(block_ids), self._slots(slots, slot_ids), self._lengths(len(block_ids)))

    def _blocks(self, block_ids: Sequence[int]) -> NDArray[np.uint64]:
        """Return the (n * layers,) addresses of pieces."""
        ids = np.array(block_ids, np.uint64)[:, None]
        return np.ascontiguousarray((self._addresses + ids * self._piece_bytes).ravel())

    def _slots(self, slots: DeviceBlocks, slot_ids: Sequence[int]) -> NDArray[np.uint64]:
        starts = slots.addresses(slot_ids)[:, None]
        return np.ascontiguousarray((starts + self._offsets).ravel())

    def _lengths(self, num_blocks: int) -> NDArray[np.uint64]:
        return np.tile(self._piece_bytes, num_blocks)


class TorchMemory:
    """KV memory of any device of torch: blocks are gathered on the device, by a stream of its own.

    A copy waits for what the steps before it have launched (`mark`), and its caller for the copy.
    """

    def __init__(self, layers: Mapping[str, Any], num_blocks: int) -> None:
        """Find the blocks; arguments and errors are those of `HostMemory`."""
        import torch  # noqa: PLC0415 - a package of gigabytes, which vLLM brings

        self._torch = torch
        self._layers = []
        for tensor in _distinct(layers).values():
            size = piece_bytes(tensor, num_blocks)
            flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            start = tensor.storage_offset() * tensor.element_size()
            self._layers.append(flat.set_(tensor.untyped_storage(), start, (num_blocks, size), (size, 1)))
        self._device = self._layers[0].device
        self.block_bytes = sum(layer.shape[1] for layer in self._layers)
        has_streams = self._device.type != "cpu"
        self._stream = torch.Stream(self._device) if has_streams else None
        self._marked: Any = None

    def mark(self) -> None:
        """Have later copies wait for what the current stream was given so far; called by the thread of the steps."""
        if self._stream is not None:
            self._marked = self._torch.accelerator.current_stream().record_event()

    def read(self, block_ids: Sequence[int], slots: DeviceBlocks, slot_ids: Sequence[int]) -> None:
        """Copy blocks to slots."""
        self._copy(block_ids, slots, slot_ids, is_reading=True)

    def write(self, block_ids: Sequence[int], slots: DeviceBlocks, slot_ids: Sequence[int]) -> None:
        """Copy slots to blocks."""
        self._copy(block_ids, slots, slot_ids, is_reading=False)

    def _copy(
        self, block_ids: Sequence[int], slots: DeviceBlocks, slot_ids: Sequence[int], *, is_reading: bool
    ) -> None:
        if self._stream is None:
            self._copy_layers(block_ids, slots, slot_ids, is_reading=is_reading)
            return
        with self._stream:
            if self._marked is not None:
                self._stream.wait_event(self._marked)
            self._copy_layers(block_ids, slots, slot_ids, is_reading=is_reading)
        self._stream.synchronize()

    def _copy_layers(
        self, block_ids: Sequence[int], slots: DeviceBlocks, slot_ids: Sequence[int], *, is_reading: bool
    ) -> None:
        torch = self._torch
        rows = torch.tensor(block_ids, device=self._device)
        data = torch.from_numpy(np.stack(slots.views(slot_ids))) if not is_reading else None
        views = [torch.from_numpy(view) for view in slots.views(slot_ids)] if is_reading else []
        start = 0
        for layer in self._layers:
            end = start + layer.shape[1]
            if data is None:
                for view, row in zip(views, layer.index_select(0, rows).cpu(), strict=True):
                    view[start:end] = row
            else:
                layer.index_copy_(0, rows, data[:, start:end].to(self._device))
            start = end


def piece_bytes(tensor: Any, num_blocks: int) -> int:
    """Return the bytes of one block in one layer's tensor; a block may be several of the kernels' own, one after another.

    Raises:
        ConfigError: blocks are no pieces of memory that follow each other.
    """
    size, rest = divmod(tensor.numel() * tensor.element_size(), num_blocks)
    per_kernel_block = tensor[0].numel()
    is_dense = (
        tensor.stride(0) == per_kernel_block
        and sum(
            (length - 1) * stride
            for length, stride in zip(tensor.shape[1:], tensor.stride()[1:], strict=True)
        )
        == per_kernel_block - 1
    )
    if rest or not is_dense:
        raise ConfigError(
            f"kv: the engine's KV memory has shape {tuple(tensor.shape)} and strides {tuple(tensor.stride())} for {num_blocks} blocks;"
            " expected a layout in which a block of one layer is one piece of memory (LBHNC or LBNHC); leave kv out"
        )
    return int(size)


def _distinct(layers: Mapping[str, Any]) -> dict[int, Any]:
    """Drop layers that share the memory of another."""
    return {tensor.data_ptr(): tensor for tensor in layers.values()}
