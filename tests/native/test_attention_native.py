"""Native decode attention against its reference in PyTorch."""

import numpy as np
import pytest

from penstock.core.native import native

torch = pytest.importorskip("torch")

from penstock.engine.paged.memory import Gather, KvMemory, KvShape  # noqa: E402
from penstock.engine.paged.models import LayerCall  # noqa: E402
from penstock.engine.paged.step import GatheredRows, NativeRows  # noqa: E402

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(native is None, reason="installed with PENSTOCK_NATIVE=OFF"),
]
NUM_BLOCKS, NUM_LAYERS, ROWS, WIDTH = 40, 3, 9, 7
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def _memory(*, kv_heads: int = 2, head_dim: int = 16, block_size: int = 16, dtype=torch.float32) -> KvMemory:
    memory = KvMemory(
        KvShape(NUM_LAYERS, kv_heads, head_dim, dtype), NUM_BLOCKS, block_size, torch.device("cpu")
    )
    memory.storage.normal_(generator=torch.Generator().manual_seed(1))
    return memory


def _rows(block_size: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(block_size)
    lengths = np.sort(random.integers(1, WIDTH * block_size + 1, ROWS))
    lengths[0], lengths[-1] = 1, WIDTH * block_size
    return random.integers(0, NUM_BLOCKS, (ROWS, WIDTH), dtype=np.int32), lengths


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size"),
    [
        (1, 1, 16, 1),
        (4, 4, 16, 16),
        (4, 2, 64, 16),
        (14, 2, 64, 8),
        (12, 4, 80, 5),
        (8, 1, 128, 32),
        (3, 1, 256, 3),
    ],
)
@pytest.mark.parametrize(
    ("window", "softcap"), [(None, None), (1, None), (37, None), (None, 50.0), (20, 5.0)]
)
def test_equals_its_twin(heads, kv_heads, head_dim, block_size, window, softcap, dtype):
    memory = _memory(kv_heads=kv_heads, head_dim=head_dim, block_size=block_size, dtype=dtype)
    tables, lengths = _rows(block_size)
    query = torch.randn(ROWS, heads, head_dim, generator=torch.Generator().manual_seed(2)).to(dtype)
    call = LayerCall(layer=1, scale=head_dim**-0.5, window=window, softcap=softcap)
    native_out, twin_out = torch.empty_like(query), torch.empty_like(query)
    NativeRows(tables, lengths, memory).attend(call, 1, query, native_out)
    GatheredRows(tables, lengths, Gather(memory)).attend(call, 1, query, twin_out)
    torch.testing.assert_close(native_out, twin_out, rtol=0, atol=TOLERANCE[dtype])


def test_large_scores_do_not_overflow():
    memory = _memory()
    memory.storage[:, :, 0] *= 1000
    tables, lengths = _rows(16)
    query = torch.full((ROWS, 4, 16), 100.0)
    out = torch.empty_like(query)
    NativeRows(tables, lengths, memory).attend(LayerCall(0, 1.0, None, None), 0, query, out)
    reference = torch.empty_like(query)
    GatheredRows(tables, lengths, Gather(memory)).attend(LayerCall(0, 1.0, None, None), 0, query, reference)
    torch.testing.assert_close(out, reference, rtol=0, atol=1e-4)


def test_reads_nothing_beyond_the_length():
    memory = _memory()
    tables = np.array([[3, 4, -1], [5, -1, -1]], dtype=np.int32)
    memory.storage[4, :, :, 1:] = torch.nan
    memory.storage[5, :, :, 7:] = torch.nan
    out = torch.empty(2, 4, 16)
    call = LayerCall(2, 0.25, None, None)
    NativeRows(tables, np.array([17, 7]), memory).attend(call, 2, torch.ones(2, 4, 16), out)
    assert not out.isnan().any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer": NUM_LAYERS}, "storage"),
        ({"query": np.zeros((2, 3, 16), np.float32), "out": np.zeros((2, 3, 16), np.float32)}, "heads"),
        ({"query": np.zeros((2, 4, 32), np.float32)}, "head_dim"),
        ({"out": np.zeros((3, 4, 16), np.float32)}, "as many rows"),
        ({"lengths": np.array([1])}, "as many rows"),
        ({"lengths": np.array([0, 1])}, "lengths"),
        ({"lengths": np.array([1, 2 * 16 + 1])}, "lengths"),
        ({"tables": np.array([[0, 0], [NUM_BLOCKS + 1, 0]], np.int32)}, "block id"),
        ({"tables": np.array([[0, 0], [-1, 0]], np.int32)}, "block id"),
    ],
)
def test_refuses_what_would_read_elsewhere(changes, message):
    arguments = {
        "query": np.zeros((2, 4, 16), np.float32),
        "storage": _memory().storage.numpy(),
        "layer": 0,
        "tables": np.zeros((2, 2), np.int32),
        "lengths": np.array([1, 32]),
        "out": np.zeros((2, 4, 16), np.float32),
        "window": 0,
        "scale": 1.0,
        "softcap": 0.0,
    }
    native.decode_attention(**arguments)
    with pytest.raises(ValueError, match=message):
        native.decode_attention(**arguments | changes)
