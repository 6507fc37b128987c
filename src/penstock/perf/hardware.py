"""Data sheets of accelerators, per device, each with its source.

Peak FLOP/s are dense (no structured sparsity). Watts include a device's share of host, switches and fans. Prices are
assumptions to be overridden, not quotations.
"""

from enum import StrEnum

from pydantic import Field, PositiveFloat, PositiveInt

from penstock.core.config import Config, nearest
from penstock.core.errors import ConfigError


class Dtype(StrEnum):
    """A number format of weights, KV or arithmetic."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"
    INT8 = "int8"
    MXFP4 = "mxfp4"
    NVFP4 = "nvfp4"

    @property
    def bytes(self) -> float:
        """Bytes per element, scales included."""
        return _BYTES[self]


_BYTES = {
    Dtype.FP32: 4.0,
    Dtype.BF16: 2.0,
    Dtype.FP16: 2.0,
    Dtype.FP8: 1.0,
    Dtype.INT8: 1.0,
    Dtype.MXFP4: 0.5 + 1 / 32,  # an 8-bit scale per 32 elements (OCP Microscaling 1.0)
    Dtype.NVFP4: 0.5 + 1 / 16,  # an 8-bit scale per 16 elements (NVIDIA, "Introducing NVFP4", 2025)
}


class Hardware(Config):
    """One device and its share of links, power and price."""

    name: str
    flops_per_s: dict[Dtype, PositiveFloat] = Field(min_length=1)
    """Dense peak by number format; a missing format uses the next wider one."""
    memory_bytes: PositiveFloat
    bandwidth_bytes_per_s: PositiveFloat
    """Bandwidth of the device's memory."""
    scale_up_devices: PositiveInt = 1
    """Devices in one NVLink domain."""
    host_devices: PositiveInt | None = None
    """Devices of one machine, as its operating system sees them; None where machines differ."""
    scale_up_bytes_per_s: PositiveFloat
    """Bandwidth per device and direction within the NVLink domain."""
    scale_out_bytes_per_s: PositiveFloat
    """Bandwidth per device and direction between domains."""
    watts: PositiveFloat
    usd_per_hour: PositiveFloat
    source: str

    def peak_flops_per_s(self, dtype: Dtype) -> float:
        """Give the peak for `dtype`, or for the next wider format of the device."""
        for candidate in _WIDER[dtype]:
            if candidate in self.flops_per_s:
                return self.flops_per_s[candidate]
        raise ConfigError(
            f"hardware {self.name} computes {', '.join(self.flops_per_s)}, but neither {dtype} nor a wider format; set"
            " weight_dtype (--weight-dtype of penstock plan) to one of them"
        )


_WIDER: dict[Dtype, tuple[Dtype, ...]] = {
    Dtype.NVFP4: (Dtype.NVFP4, Dtype.FP8, Dtype.BF16, Dtype.FP32),
    Dtype.MXFP4: (Dtype.MXFP4, Dtype.NVFP4, Dtype.FP8, Dtype.BF16, Dtype.FP32),
    Dtype.FP8: (Dtype.FP8, Dtype.BF16, Dtype.FP32),
    Dtype.INT8: (Dtype.INT8, Dtype.FP8, Dtype.BF16, Dtype.FP32),
    Dtype.FP16: (Dtype.FP16, Dtype.BF16, Dtype.FP32),
    Dtype.BF16: (Dtype.BF16, Dtype.FP16, Dtype.FP32),
    Dtype.FP32: (Dtype.FP32,),
}

_PRICE = "price: assumed"
_TERA, _GIGA = 1e12, 1e9
_TRAY_DEVICES = 4
"""GPUs of a compute tray of GB200 and GB300 NVL72, each tray a machine: 18 trays have 72 (NVIDIA's data sheets)."""
_NVL72_DEVICES = 72


def _nvidia(  # noqa: PLR0917 - columns of the table below
    name: str, tflops: dict[Dtype, float], memory_gb: float, bandwidth_tb_s: float, link: tuple[int, float, float],
    watts: float, usd_per_hour: float, source: str,
) -> Hardware:  # fmt: skip
    devices, scale_up_gb_s, scale_out_gb_s = link
    return Hardware(
        name=name,
        flops_per_s={dtype: value * _TERA for dtype, value in tflops.items()},
        memory_bytes=memory_gb * _GIGA,
        bandwidth_bytes_per_s=bandwidth_tb_s * _TERA,
        scale_up_devices=devices,
        host_devices={1: None, _NVL72_DEVICES: _TRAY_DEVICES}.get(devices, devices),
        scale_up_bytes_per_s=scale_up_gb_s * _GIGA,
        scale_out_bytes_per_s=scale_out_gb_s * _GIGA,
        watts=watts,
        usd_per_hour=usd_per_hour,
        source=f"{source}; {_PRICE}",
    )


_CATALOGUE = (
    _nvidia("a100", {Dtype.BF16: 312, Dtype.INT8: 624}, 80, 2.039, (8, 300, 25), 6500 / 8, 1.8,
            "NVIDIA A100 80GB SXM data sheet; DGX A100: 6.5 kW, 200 Gb/s a GPU"),
    _nvidia("h100", {Dtype.BF16: 989, Dtype.FP8: 1979}, 80, 3.35, (8, 450, 50), 10200 / 8, 3.0,
            "NVIDIA H100 SXM data sheet (half of the sparse figures); DGX H100: 10.2 kW, 400 Gb/s a GPU"),
    _nvidia("h200", {Dtype.BF16: 989, Dtype.FP8: 1979}, 141, 4.8, (8, 450, 50), 10200 / 8, 3.8,
            "NVIDIA H200 SXM data sheet (half of the sparse figures); DGX H200: 10.2 kW, 400 Gb/s a GPU"),
    _nvidia("b200", {Dtype.BF16: 2250, Dtype.FP8: 4500, Dtype.NVFP4: 9000}, 180, 8.0, (8, 900, 50), 14300 / 8, 5.5,
            "NVIDIA DGX B200 data sheet, an eighth (half of the sparse figures): 14.3 kW, 400 Gb/s a GPU"),
    _nvidia("gb200", {Dtype.BF16: 2500, Dtype.FP8: 5000, Dtype.NVFP4: 10000}, 186, 8.0, (72, 900, 50), 120000 / 72, 6.5,
            "NVIDIA GB200 NVL72 data sheet, a 72nd (half of the sparse figures); rack of 120 kW, 400 Gb/s a GPU"),
    _nvidia("gb300", {Dtype.BF16: 2500, Dtype.FP8: 5000, Dtype.NVFP4: 15000}, 279, 8.0, (72, 900, 100), 132000 / 72, 8.0,
            "NVIDIA GB300 NVL72 data sheet, a 72nd (dense FP4 as stated); rack of 132 kW, 800 Gb/s a GPU"),
    _nvidia("l40s", {Dtype.BF16: 362, Dtype.FP8: 733}, 48, 0.864, (1, 32, 12.5), 600, 1.0,
            "NVIDIA L40S data sheet (half of the sparse figures), PCIe 4.0 x16; 600 W: 350 W board and a share of its host"),
    Hardware(
        name="cpu", flops_per_s={Dtype.FP32: 90e9}, memory_bytes=8e9, bandwidth_bytes_per_s=10e9,
        scale_up_bytes_per_s=5e9, scale_out_bytes_per_s=1e9, watts=15, usd_per_hour=0.05,
        source="one AVX-512 core of an AMD EPYC: sgemm and stream as one PyTorch thread reaches them; memory, links and 15 W:"
        f" a core's share of its host, assumed; {_PRICE}",
    ),
)  # fmt: skip

HARDWARE: dict[str, Hardware] = {entry.name: entry for entry in _CATALOGUE}
_ALIASES = {"h100_sxm": "h100", "h200_sxm": "h200", "a100_sxm": "a100", "b200_sxm": "b200"}


def find_hardware(name: str) -> Hardware:
    """Look up a device by name, ignoring case.

    Raises:
        ConfigError: unknown; suggests the nearest name.
    """
    key = name.lower()
    entry = HARDWARE.get(_ALIASES.get(key, key))
    if entry is None:
        raise ConfigError(f"hardware: unknown {name!r}{nearest(key, list(HARDWARE))}")
    return entry
