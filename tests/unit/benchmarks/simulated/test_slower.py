"""How much longer steps take with the worse factors: the range that `benchmarks.simulated.slower` and docs/disaggregation.md state."""

from dataclasses import replace

from benchmarks.simulated.slower import SLOWER
from penstock.perf.model.catalogue import find_shape
from penstock.perf.model.hardware import Dtype, find_hardware
from penstock.perf.model.parallel import Parallel
from penstock.perf.roofline.roofline import Roofline


def ratios():
    """Yield the step time with the worse factors over the one with the fitted factors."""
    shape, hardware = find_shape("llama-3.1-70b"), find_hardware("h100")
    for tp in (1, 2, 4, 8):
        fitted = Roofline(shape, hardware, Parallel(tp=tp), weight_dtype=Dtype.FP8)
        worse = replace(fitted, factors=SLOWER)
        for prompt_tokens in (128, 512, 3000, 8192):
            yield worse.prefill_s(prompt_tokens) / fitted.prefill_s(prompt_tokens)
        for batch in (1, 8, 32, 128, 256):
            for context in (64, 512, 3072, 8192, 32_768):
                step = batch, batch * context
                yield worse.decode_step_s(*step) / fitted.decode_step_s(*step)
                for tokens in (128, 1024):
                    chunk = [(tokens, 1500)]
                    yield worse.mixed_step_s(chunk, *step) / fitted.mixed_step_s(chunk, *step)


def test_steps_take_as_much_longer_as_is_stated():
    found = list(ratios())
    assert (round(min(found), 1), round(max(found), 1)) == (1.2, 1.4)
