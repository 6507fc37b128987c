"""Who is cheapest: native against its Python reference."""

import numpy as np
import pytest

from penstock.core.native import native
from penstock.router.policies import cheapest, cheapest_python

pytestmark = pytest.mark.skipif(native is None, reason="installed with PENSTOCK_NATIVE=OFF")


@pytest.mark.parametrize("seed", range(20))
def test_native_and_twin_choose_alike(seed):
    rng = np.random.default_rng(seed)
    for num_terms, num_slots in ((1, 1), (1, 7), (10, 3), (10, 8), (3, 1000)):
        terms = rng.integers(0, 4, (num_terms, num_slots)) * rng.choice([0.1, 1.0])  # many are equal
        terms[:, rng.random(num_slots) < 0.1] = rng.choice([np.inf, -np.inf, np.nan])
        eligible = rng.random(num_slots) < rng.choice([0.1, 0.9, 1.0])
        eligible[rng.integers(num_slots)] = True
        for request_hash in rng.integers(0, 2**64, 5, dtype=np.uint64).tolist():
            assert cheapest(terms, eligible, request_hash) == cheapest_python(terms, eligible, request_hash)


def test_costs_of_other_types_are_converted():
    eligible = np.ones(3, dtype=np.bool_)
    assert cheapest(np.array([[2, 1, 3]]), eligible, 7) == 1
    assert cheapest(np.array([[2, 1, 3]], dtype=np.float32), eligible, 7) == 1
    assert cheapest(np.array([[2.0, 1.0, 3.0]] * 2)[:, ::-1], eligible, 7) == 1


def test_rows_of_other_lengths_are_refused():
    with pytest.raises(ValueError, match="terms"):
        cheapest(np.zeros((1, 4)), np.ones(3, dtype=np.bool_), 7)
