"""Ideal roofline factors, so that prices can be computed by hand."""

from penstock.perf.hardware import Dtype, Hardware, find_hardware
from penstock.perf.roofline import Factors

IDEAL = Factors(
    gemm=1,
    gemm_narrow=1,
    gemm_half_rows=0,
    attention=1,
    bandwidth=1,
    kv_bandwidth=1,
    all_reduce_bandwidth=1,
    all_reduce_s=0,
    all_reduce_ramp_s=0,
    collective_bandwidth=1,
    collective_s=0,
    attention_s=0,
    layer_s=0,
    step_s=0,
    overlap=64,
    activation_passes=0,
)
"""Every peak is reached, and only bytes and FLOPs take time."""
ENDLESS = 1e30


def only(hardware: str, **kept: object) -> Hardware:
    """Give a device where nothing takes time but what is `kept`."""
    free: dict[str, object] = {
        "flops_per_s": {Dtype.BF16: ENDLESS},
        "bandwidth_bytes_per_s": ENDLESS,
        "scale_up_bytes_per_s": ENDLESS,
        "scale_out_bytes_per_s": ENDLESS,
    }
    return find_hardware(hardware).model_copy(update=free | kept)
