"""The `kv` policy's prices: native against its Python reference."""

import dataclasses
from functools import partial

import numpy as np
import pytest

from penstock.core.native import native
from penstock.router.predicted_seconds import PredictedSeconds, terms_python
from penstock.testing.routing_policy import make_context, make_prices, some_contexts

pytestmark = pytest.mark.skipif(native is None, reason="installed with PENSTOCK_NATIVE=OFF")


@pytest.fixture(
    params=[] if native is None else range(len(native.price_kernels())),
    ids=lambda number: native.price_kernels()[number],
)
def kernel(request, monkeypatch):
    """Have the policy use each of the loops that this machine runs: with the widest vectors, and without."""
    monkeypatch.setattr(native, "predicted_seconds", partial(native.predicted_seconds, kernel=request.param))


def test_every_machine_has_the_portable_kernel():
    assert native.price_kernels()[-1] == "portable"
    with pytest.raises(ValueError, match="kernel: must be an index"):
        native.predicted_seconds(next(some_contexts()), *[1.0] * 7, kernel=9)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("seed", range(10))
def test_native_and_twin_give_equal_seconds(seed):
    for context in some_contexts(seed):
        np.testing.assert_array_equal(PredictedSeconds().terms(context), terms_python(context))


def test_columns_of_a_log_line_may_be_wider():
    context = next(some_contexts())
    wider = dataclasses.replace(context, overlap_blocks=context.overlap_blocks.astype(np.int64))
    np.testing.assert_array_equal(PredictedSeconds().terms(wider), terms_python(context))


def test_columns_of_other_lengths_are_refused():
    with pytest.raises(ValueError, match="running_requests"):
        PredictedSeconds().terms(make_context(3, running_requests=[0, 0]))
    with pytest.raises(ValueError, match="onboard_token_s"):
        PredictedSeconds().terms(make_context(3, prices=make_prices(3, onboard_token_s=[[0.0] * 3])))


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("num_slots", [1023, 1024, 1025, 5000])
@pytest.mark.parametrize("order", ["random", "rising", "falling", "waves", "equal", "few"])
def test_medians_of_many_workers_are_exact(num_slots, order):
    """Also where a sample at even distances says nothing of the others."""
    rng = np.random.default_rng(num_slots)
    queued = {
        "random": rng.integers(0, 1_000_000, num_slots),
        "rising": np.arange(num_slots),
        "falling": np.arange(num_slots)[::-1],
        "waves": np.where(np.arange(num_slots) % (num_slots // 127) == 0, 1_000_000, np.arange(num_slots)),
        "equal": np.full(num_slots, 7),
        "few": rng.integers(0, 3, num_slots),
    }[order]
    context = make_context(
        num_slots,
        queued_prefill_tokens=queued,
        active_blocks=queued % 3000,
        running_requests=rng.integers(0, 100, num_slots),
        request_rate_per_s=100.0,
    )
    np.testing.assert_array_equal(PredictedSeconds().terms(context), terms_python(context))
