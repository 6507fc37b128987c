"""Copies between an engine's layers and slots, by address and by torch."""

from typing import Any

import numpy as np
import pytest

from penstock.core.errors import ConfigError
from penstock.engine.kv_tiers.memory import HostMemory, TorchMemory
from penstock.kv.connector.staging import Staging

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.engine
BLOCKS = 8


def layers_of(kind: str) -> dict[str, Any]:
    """Four layers as vLLM lays them out: heads first, in smaller kernel blocks, or of unequal sizes."""
    shapes = {
        "heads": [(BLOCKS, 2, 4, 6)] * 4,
        "kernel blocks": [(2 * BLOCKS, 2, 4, 6)] * 4,
        "unequal": [(BLOCKS, 2, 4, 6), (BLOCKS, 1, 4, 2)] * 2,
    }[kind]
    generator = torch.Generator().manual_seed(1)
    return {
        f"layer.{number}": torch.randn(shape, generator=generator, dtype=torch.bfloat16)
        for number, shape in enumerate(shapes)
    }


@pytest.mark.parametrize("memory_type", [HostMemory, TorchMemory])
@pytest.mark.parametrize("kind", ["heads", "kernel blocks", "unequal"])
def test_blocks_come_back_as_they_were_and_no_other_changes(memory_type: Any, kind: str) -> None:
    layers = layers_of(kind)
    before = {name: tensor.clone() for name, tensor in layers.items()}
    memory = memory_type(layers, BLOCKS)
    memory.mark()
    assert memory.block_bytes * BLOCKS == sum(tensor.numel() * 2 for tensor in layers.values())
    staging = Staging(memory.block_bytes)
    memory.read([5, 2], staging.blocks, [3, 0])
    by_block = [tensor.reshape(BLOCKS, -1)[5] for tensor in layers.values()]
    expected = torch.cat(by_block).view(torch.uint8).numpy()
    assert np.array_equal(staging.blocks.views([3])[0], expected), "layers follow each other in a slot"
    for tensor in layers.values():
        tensor.zero_()
    memory.write([1, 2], staging.blocks, [3, 0])
    for name, tensor in layers.items():
        now, then = tensor.reshape(BLOCKS, -1), before[name].reshape(BLOCKS, -1)
        assert torch.equal(now[1], then[5])
        assert torch.equal(now[2], then[2])
        assert not now[[0, *range(3, BLOCKS)]].any()
    staging.close()


def test_layers_that_share_memory_are_copied_once() -> None:
    layer = torch.zeros(BLOCKS, 2, 4, 6)
    assert HostMemory({"a": layer, "b": layer.view(BLOCKS, 2, 4, 6)}, BLOCKS).block_bytes == 192


def test_a_layout_whose_blocks_are_scattered_is_refused() -> None:
    layer = torch.zeros(2, BLOCKS, 4, 6).transpose(0, 1)
    with pytest.raises(ConfigError, match="expected a layout in which a block of one layer is one piece"):
        HostMemory({"a": layer}, BLOCKS)
