"""The roofline's fitted factors: the fraction of hardware peaks that engines reach, and fixed costs."""

from pydantic import Field

from penstock.core.config import Config
from penstock.core.types.events import Tier


class Factors(Config):
    """Fractions of peaks, and fixed costs of launches and collectives.

    `tools/fit_roofline.py` fits them: all-reduces to those measured on H100, and gemm, attention, kv_bandwidth, layer_s
    and step_s to three of the reference tables (8B on one H100, 70B on four and in fp8 on two). The others were chosen
    before, to the tables together. Tests compare with the three tables that are left out.
    """

    gemm: float = Field(default=0.77, gt=0, le=1)
    """Fraction of the peak, for 16- and 32-bit products of many rows."""
    gemm_narrow: float = Field(default=0.66, gt=0, le=1)
    """Fraction of the peak, for 8- and 4-bit products."""
    gemm_half_rows: float = Field(default=22.0, ge=0)
    """Rows at which a product reaches half of `gemm`."""
    attention: float = Field(default=0.69, gt=0, le=1)
    """Fraction of the 16-bit peak, for prefill attention."""
    bandwidth: float = Field(default=0.92, gt=0, le=1)
    """Fraction of memory bandwidth, for weights."""
    kv_bandwidth: float = Field(default=0.90, gt=0, le=1)
    """Fraction of memory bandwidth, for decode attention."""
    all_reduce_bandwidth: float = Field(default=0.69, gt=0, le=1)
    """Fraction of link bandwidth, for a large all-reduce."""
    all_reduce_s: float = Field(default=3.6e-6, ge=0)
    """Latency of a small all-reduce."""
    all_reduce_ramp_s: float = Field(default=2.5e-6, ge=0)
    """Extra seconds of a large all-reduce per further device, for synchronization between kernels."""
    all_reduce_ramp_bytes: float = Field(default=1.28e6, gt=0)
    """Bytes per device at which an all-reduce takes half of `all_reduce_ramp_s`."""
    collective_bandwidth: float = Field(default=0.75, gt=0, le=1)
    """Fraction of link bandwidth, for all-to-all, pipeline hops and transfers between workers."""
    collective_s: float = Field(default=13.6e-6, ge=0)
    """Latency of one such collective."""
    attention_s: float = Field(default=7e-6, ge=0)
    layer_s: float = Field(default=38.3e-6, ge=0)
    """Kernel launches of a layer that are not overlapped."""
    step_s: float = Field(default=0.24e-3, ge=0)
    """Scheduling and sampling of a step."""
    overlap: float = Field(default=4.0, ge=1)
    """Exponent of the smooth maximum: 1 adds, infinity takes the larger."""
    activation_passes: float = Field(default=12.0, ge=0)
    """Times that a layer reads or writes its hidden states."""
    memory_fraction: float = Field(default=0.9, gt=0, le=1)
    """Fraction of device memory for weights and KV."""
    storage_bytes_per_s: dict[Tier, float] = Field(
        default={Tier.HOST: 40e9, Tier.DISK: 5e9, Tier.OBJECT: 1e9}
    )
    """Onboarding speed of lower tiers: PCIe 5.0 x16 as measured, an NVMe drive, one object-store stream."""
