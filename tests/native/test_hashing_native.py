"""Native against its Python reference, where the properties' sizes do not reach."""

import numpy as np
import pytest

from penstock.core.hashing import DEFAULT_KEY, block_hashes_python, root_hash
from penstock.core.native import native

pytestmark = pytest.mark.skipif(native is None, reason="installed with PENSTOCK_NATIVE=OFF")
FIRST = root_hash(16, b"")


def _tokens(count: int) -> np.ndarray:
    return np.random.default_rng(count).integers(-(2**31), 2**31, count, dtype=np.int32)


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 5, 8, 15, 16, 17, 32, 64, 128, 256])
def test_every_block_size_and_remainder_of_the_lanes(block_size):
    for num_blocks in (*range(20), 40):
        tokens = _tokens(num_blocks * block_size + block_size // 2)
        expected = block_hashes_python(tokens, block_size, FIRST, {}, DEFAULT_KEY)
        np.testing.assert_array_equal(
            native.block_hashes(tokens, block_size, FIRST, {}, DEFAULT_KEY), expected
        )


@pytest.mark.parametrize("block_size", [3, 16])
@pytest.mark.parametrize("extra_bytes", [0, 1, 7, 8, 9, 255, 256, 1000])
def test_extras_of_any_length_in_any_lane(block_size, extra_bytes):
    tokens = _tokens(30 * block_size)
    extra = {block: bytes([block]) * extra_bytes for block in (0, 3, 7, 8, 25, 29)}
    expected = block_hashes_python(tokens, block_size, FIRST, extra, DEFAULT_KEY)
    np.testing.assert_array_equal(
        native.block_hashes(tokens, block_size, FIRST, extra, DEFAULT_KEY), expected
    )


def test_long_input_lets_other_threads_run(others_run_beside):
    tokens = np.zeros(2_000_000, dtype=np.int32)
    assert others_run_beside(lambda: native.block_hashes(tokens, 16, FIRST, {}, DEFAULT_KEY))


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"block_size": 0}, ValueError),
        ({"key": b"short"}, ValueError),
        ({"tokens": np.zeros(4, dtype=np.int64)}, TypeError),
        ({"tokens": np.zeros((2, 2), dtype=np.int32)}, TypeError),
        ({"extra": {0: "text"}}, RuntimeError),
        ({"extra": {-1: b"x"}}, RuntimeError),
    ],
)
def test_wrong_arguments_raise(arguments, error):
    good = {
        "tokens": np.zeros(4, dtype=np.int32),
        "block_size": 2,
        "first": (0, 0),
        "extra": {},
        "key": DEFAULT_KEY,
    }
    with pytest.raises(error):
        native.block_hashes(**(good | arguments))
