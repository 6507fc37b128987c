"""KV blocks as bytes, and how many of them are kept."""

import os

import numpy as np
import pytest

from penstock.core.errors import ConfigError
from penstock.transfer import Arena

torch = pytest.importorskip("torch")

from penstock.engine.paged import memory as memory_module  # noqa: E402
from penstock.engine.paged.memory import KvMemory, KvShape, free_memory_bytes, plan_blocks  # noqa: E402
from penstock.transfer.regions import arena  # noqa: E402

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


@pytest.fixture
def free_100_000(monkeypatch):
    monkeypatch.setattr(memory_module, "free_memory_bytes", lambda _: 100_000)


@pytest.mark.parametrize(
    ("settings", "blocks"),
    [
        ({"kv_blocks": 12}, 12),
        ({"kv_memory_bytes": 10_000}, 10),
        ({"kv_memory_bytes": 2000}, 2),
        ({}, 50),  # half of what is free
        ({"sharing_engines": 5}, 10),
        ({"kv_blocks": 100}, r"kv_blocks: 100 blocks of 1000 bytes need .* at most 99 fit"),
        ({"kv_memory_bytes": 1999}, r"kv_memory_bytes: 1999 hold fewer than two KV blocks of 1000 bytes"),
        ({"kv_memory_bytes": 200_000}, r"at most 99 fit"),
    ],
)
@pytest.mark.usefixtures("free_100_000")
def test_how_many_blocks(settings, blocks):
    given = {"kv_blocks": None, "kv_memory_bytes": None} | settings
    if isinstance(blocks, int):
        assert plan_blocks(1000, device=CPU, **given) == blocks
        return
    with pytest.raises(ConfigError, match=blocks):
        plan_blocks(1000, device=CPU, **given)


def test_blocks_on_a_cpu_lie_in_memory_that_other_processes_can_map():
    memory = KvMemory(SHAPE, 4, 4, CPU)
    arena = Arena.around(memory.storage.data_ptr(), memory.storage.nbytes)
    assert arena is not None
    assert arena.is_resident, "taken when it was made"
    assert (arena.address, arena.size_bytes) == (memory.storage.data_ptr(), memory.storage.nbytes)
    assert not os.get_inheritable(arena.fd), "programs that this process starts do not keep it"
    assert not memory.storage.any()
    memory.storage[3] = 1
    other = np.frombuffer(os.pread(arena.fd, BLOCK_BYTES, 3 * BLOCK_BYTES), np.uint8)
    assert other.any(), "what one writes, the other one sees"
    memory.close()
    memory.close()
    assert Arena.around(memory.storage.data_ptr(), 1) is None
    assert memory.storage[3].float().mean() == 1, "whoever has it still may read it"


def test_memory_that_others_take_meanwhile_is_an_error_and_not_the_end_of_a_process(monkeypatch):
    free = iter([1 << 30, 40 << 20, 30 << 20, 9 << 20])
    monkeypatch.setattr(memory_module, "free_memory_bytes", lambda _: next(free))
    message = r"^kv_blocks: 49152 blocks of 768 bytes: 0\.02 of 0\.04 GiB are still to be taken, .* left 0\.01; lower kv_blocks"
    assert plan_blocks(BLOCK_BYTES, kv_blocks=49_152, kv_memory_bytes=None, device=CPU) == 49_152
    with pytest.raises(ConfigError, match=message):
        KvMemory(SHAPE, 49_152, 4, CPU)


def test_files_that_were_read_are_free_memory_of_a_control_group(monkeypatch, tmp_path):
    for name, text in (
        ("memory.max", "9000000"),
        ("memory.current", "8000000"),
        ("memory.stat", "inactive_file 5000000\n"),
    ):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(arena, "_CONTROL_GROUP", tmp_path)
    assert free_memory_bytes(CPU) == 6_000_000
    (tmp_path / "memory.max").write_text("max")
    assert free_memory_bytes(CPU) > 6_000_000
