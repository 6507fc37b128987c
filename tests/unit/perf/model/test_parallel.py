"""Every parallelism that is tried can be priced."""

import pytest

from penstock.perf.model.catalogue import find_shape
from penstock.perf.model.hardware import find_hardware
from penstock.perf.model.parallel import parallelisms
from penstock.perf.roofline.roofline import Roofline

SHAPES = [find_shape("llama-3.1-8b"), find_shape("deepseek-r1")]
HARDWARE = [find_hardware("h100"), find_hardware("gb200")]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
@pytest.mark.parametrize("hardware", HARDWARE, ids=lambda entry: entry.name)
def test_every_parallelism_tried_can_be_priced(shape, hardware) -> None:
    choices = list(parallelisms(shape, hardware, devices_max=64))
    assert len(choices) == len(set(map(repr, choices)))
    for parallel in choices:
        assert parallel.devices <= 64
        assert parallel.tp <= hardware.scale_up_devices
        assert Roofline(shape, hardware, parallel).decode_step_s(1, 1) > 0
