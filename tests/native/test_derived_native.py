"""Derived names of blocks: native against its Python reference."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.native import native
from penstock.sim.workload.prompt import derived_hashes_python

pytestmark = pytest.mark.skipif(native is None, reason="installed with PENSTOCK_NATIVE=OFF")
words = st.integers(0, (1 << 64) - 1)


@given(
    own=words,
    shared=st.lists(words, max_size=12),
    unit_tokens=st.integers(1, 600),
    block_size=st.integers(1, 600),
    start=st.integers(0, 40),
    count=st.integers(0, 40),
)
def test_native_and_twin_give_equal_names(own, shared, unit_tokens, block_size, start, count):
    arguments = (own, np.array(shared, dtype=np.uint64), unit_tokens, block_size, (start, start + count))
    expected = derived_hashes_python(*arguments)
    np.testing.assert_array_equal(native.derived_hashes(*arguments), expected)


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"unit_tokens": 0}, ValueError),
        ({"block_size": 0}, ValueError),
        ({"blocks": (1, 0)}, ValueError),
        ({"blocks": (-1, 0)}, TypeError),
        ({"own": 1 << 64}, TypeError),
        ({"shared": np.zeros((2, 2), dtype=np.uint64)}, TypeError),
    ],
)
def test_wrong_arguments_are_refused(changed, error):
    good = {
        "own": 0,
        "shared": np.zeros(1, dtype=np.uint64),
        "unit_tokens": 16,
        "block_size": 16,
        "blocks": (1, 2),
    }
    with pytest.raises(error):
        native.derived_hashes(**(good | changed))
