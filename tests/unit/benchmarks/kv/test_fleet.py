"""What kv-fleet makes of its runs, and the link that it slows them with."""

import pytest

from benchmarks.kv.fleet import LONG_PAYS_GB_PER_S, SHORT_PAYS_GB_PER_S
from penstock.perf.model.catalogue import find_shape
from penstock.perf.model.hardware import Dtype, find_hardware
from penstock.perf.model.parallel import Parallel
from penstock.perf.roofline.roofline import Roofline


@pytest.mark.parametrize(
    ("hardware", "tensor", "tokens", "pays"),
    [("h100", 2, 4096, SHORT_PAYS_GB_PER_S), ("h200", 1, 98_304, LONG_PAYS_GB_PER_S)],
)
def test_what_pays_is_the_rooflines(hardware, tensor, tokens, pays):
    shape = find_shape("llama-3.1-70b")
    model = Roofline(shape, find_hardware(hardware), Parallel(tp=tensor), Dtype.FP8, Dtype.FP8)
    bytes_ = tokens * shape.kv_bytes_per_token(Dtype.FP8)
    assert bytes_ / model.prefill_s(tokens) / 1e9 == pytest.approx(pays, rel=0.03)
