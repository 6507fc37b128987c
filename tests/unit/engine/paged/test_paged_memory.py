"""KV blocks as bytes, and how many of them are kept."""

import pytest

from penstock.core.errors import ConfigError

torch = pytest.importorskip("torch")

from penstock.engine.paged import memory as memory_module  # noqa: E402
from penstock.engine.paged.memory import Gather, KvMemory, KvShape, free_memory_bytes, plan_blocks  # noqa: E402

pytestmark = pytest.mark.engine
CPU = torch.device("cpu")
SHAPE = KvShape(num_layers=3, num_kv_heads=2, head_dim=8, dtype=torch.bfloat16)
BLOCK_BYTES = 3 * 2 * 4 * 2 * 8 * 2


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
