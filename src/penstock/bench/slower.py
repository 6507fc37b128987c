"""An engine that is not what the router and the placements take it for, where no reference table is at hand."""

from dataclasses import replace

from penstock.core.errors import ConfigError
from penstock.perf.factors import Factors
from penstock.perf.profile import DecodePoint, PrefillPoint, Profile
from penstock.perf.roofline import Roofline
from penstock.perf.speculation import price_per_token

SLOWER = Factors(
    gemm=0.64,
    gemm_narrow=0.52,
    gemm_half_rows=33.0,
    attention=0.55,
    bandwidth=0.78,
    kv_bandwidth=0.62,
    all_reduce_bandwidth=0.46,
    all_reduce_s=4.8e-6,
    all_reduce_ramp_s=3.3e-6,
    collective_bandwidth=0.50,
    collective_s=18e-6,
    attention_s=8e-6,
    layer_s=44e-6,
    step_s=0.32e-3,
)
"""Each factor a seventh to a half worse than the fitted one, unevenly, so that no single correction makes up for it:
steps take 1.2 to 1.45 times as long."""
_PROMPTS = tuple(1 << power for power in range(5, 16))
_CONTEXTS = (64, 512, 2048, 8192, 32768)


def slower_profile(expected: Roofline, *, batch_max: int) -> Profile:
    """Profile an engine like `expected`, but with the factors `SLOWER`.

    Args:
        expected: what the router takes it for.
        batch_max: sequences in its largest batch.
    """
    engine = price_per_token(replace(expected, factors=SLOWER))
    if batch_max < 1:
        raise ConfigError(f"batch_max: must be >= 1, got {batch_max}")
    batches = [1 << power for power in range((batch_max - 1).bit_length() + 1)]
    parallel = expected.parallel
    experts = f" experts {expected.expert_dtype}," if expected.shape.moe else ""
    return Profile(
        engine=f"{expected.shape.name}, weights {expected.weight_dtype},{experts} KV {expected.kv_dtype},"
        f" tp {parallel.tp} pp {parallel.pp} dp {parallel.dp} ep {parallel.ep}",
        prefill=tuple(PrefillPoint(new_tokens=n, seconds=engine.prefill_s(n)) for n in _PROMPTS),
        decode=tuple(
            DecodePoint(batch=batch, context=context, seconds=engine.decode_step_s(batch, batch * context))
            for batch in batches
            for context in _CONTEXTS
        ),
        machine=f"{expected.hardware.name}: not measured; the roofline with every factor a seventh to a half worse"
        " (penstock.bench.slower)",
    )
