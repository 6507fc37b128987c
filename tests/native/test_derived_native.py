"""Derived names of blocks: native against its Python reference."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.native import native
from penstock.sim.workload import derived_hashes_python

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
