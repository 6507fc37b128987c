"""Factors of engines that are slower than the latency model expects."""

from penstock.perf.roofline.factors import Factors

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
"""Each factor is a seventh to a half worse than the fitted one, unevenly, so that no single correction compensates:
steps of the 70B model in fp8 on H100, tp 1 to 8, batches of 1 to 256 and contexts of 64 to 32,768, take 1.2 to 1.4 times as long."""
