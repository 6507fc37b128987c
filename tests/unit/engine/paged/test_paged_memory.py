"""KV blocks as bytes, and how many of them are kept."""

import numpy as np
import pytest

from penstock.core.errors import ConfigError

torch = pytest.importorskip("torch")

from penstock.engine.paged import memory as memory_module  # noqa: E402
from penstock.engine.paged.memory import Gather, KvMemory, KvShape, free_memory_bytes, plan_blocks  # noqa: E402

pytestmark = pytest.mark.engine
CPU = torch.device("cpu")
SHAPE = KvShape(num_layers=3, num_kv_heads=2, head_dim=8, dtype=torch.bfloat16)
BLOCK_BYTES = 3 * 2 * 4 * 2 * 8 * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_blocks_round_trip_as_bytes(dtype):
    shape = KvShape(3, 2, 8, dtype)
    source, target = (KvMemory(shape, 10, 4, CPU) for _ in range(2))
    source.storage.normal_()
    blocks = source.read([7, 2, 9])
    assert blocks.shape == (3, shape.block_bytes(4))
    target.write([1, 0, 5], blocks)
    assert torch.equal(target.storage[[1, 0, 5]], source.storage[[7, 2, 9]])
    assert not target.storage[[2, 3, 4, 6, 7, 8, 9, 10]].any()
    blocks[:] = 0  # a copy, not a view
    assert source.storage[7].any()


def test_a_block_is_one_run_of_bytes():
    memory = KvMemory(SHAPE, 4, 4, CPU)
    keys, values = memory.by_token[1]
    keys[2], values[2] = 1, 2
    block = memory.storage[2]
    assert block.is_contiguous()
    assert block.nbytes == SHAPE.block_bytes(4) == BLOCK_BYTES
    assert block.float().sum() == 3 * 4 * 2 * 8


def test_gather_copies_blocks_of_one_layer_and_keeps_its_memory():
    memory = KvMemory(SHAPE, 8, 4, CPU)
    memory.storage.normal_()
    gather = Gather(memory)
    gather(0, torch.arange(8))
    keys, values = gather(2, torch.tensor([5, 0, 5]))
    again, _ = gather(1, torch.tensor([1]))
    assert again.data_ptr() == keys.data_ptr()
    keys, values = gather(2, torch.tensor([5, 0, 5]))
    assert torch.equal(keys.view(3, 4, 2, 8), memory.by_token[2][0][[5, 0, 5]])
    assert torch.equal(values.view(3, 4, 2, 8), memory.by_token[2][1][[5, 0, 5]])


@pytest.mark.parametrize("block_ids", [[-1], [4], [0, 4]])
def test_other_blocks_are_refused(block_ids):
    memory = KvMemory(SHAPE, 4, 4, CPU)
    with pytest.raises(ValueError, match=r"block_ids: must be in 0\.\.3"):
        memory.read(block_ids)


@pytest.mark.parametrize("shape", [(2, BLOCK_BYTES), (1, BLOCK_BYTES - 1)])
def test_other_sizes_are_refused(shape):
    memory = KvMemory(SHAPE, 4, 4, CPU)
    with pytest.raises(ValueError, match="expected shape"):
        memory.write([1], np.zeros(shape, np.uint8))


def test_no_blocks_are_read_and_written():
    memory = KvMemory(SHAPE, 4, 4, CPU)
    memory.write([], memory.read([]))


@pytest.mark.parametrize(
    ("settings", "blocks"),
    [
        ({"kv_blocks": 12}, 12),
        ({"kv_memory_bytes": 10_000}, 10),
        ({"kv_memory_bytes": 2000}, 2),
        ({}, 50),  # half of what is free
    ],
)
def test_how_many_blocks(monkeypatch, settings, blocks):
    monkeypatch.setattr(memory_module, "free_memory_bytes", lambda _: 100_000)
    given = {"kv_blocks": None, "kv_memory_bytes": None} | settings
    assert plan_blocks(1000, device=CPU, **given) == blocks


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_blocks": 100}, r"kv_blocks: 100 blocks of 1000 bytes need .* at most 99 fit"),
        ({"kv_memory_bytes": 1999}, r"kv_memory_bytes: 1999 hold fewer than two KV blocks of 1000 bytes"),
        ({"kv_memory_bytes": 200_000}, r"at most 99 fit"),
    ],
)
def test_too_much_or_too_little(monkeypatch, settings, message):
    monkeypatch.setattr(memory_module, "free_memory_bytes", lambda _: 100_000)
    given = {"kv_blocks": None, "kv_memory_bytes": None} | settings
    with pytest.raises(ConfigError, match=message):
        plan_blocks(1000, device=CPU, **given)


def test_free_memory_of_this_machine():
    assert 1 << 20 < free_memory_bytes(CPU) < 1 << 50
