"""Models on kinds of hardware, simulated at targets, and what the roofline is held against."""

from collections.abc import Iterator

from penstock.perf.hardware import Dtype, find_hardware
from penstock.perf.model_config import find_shape
from penstock.perf.model_shape import Parallel
from penstock.perf.roofline import Roofline
from tables.read import figure, ratio, report, table, text

_HARDWARE = ("h100", "gb200", "gb300")
_MODELS = {
    "8b": "8B, bf16",
    "70b": "70B, fp8",
    "671b": "671B, fp8; NVFP4 experts on Blackwell",
}
_KINDS = ("aggregated", "disaggregated")


def _file(model: str, hardware: str) -> str:
    return f"deployments_{model}-{hardware}" if model == "671b" else f"deployments_{model}"


def _simulated(model: str, hardware: str, key: str) -> float | None:
    """Give a figure of a row; None where it was last made when pools were simulated separately and some engines were slower than expected."""
    file = _file(model, hardware)
    return figure(file, key) if "layouts" in report(file)["config"] else None


def simulated() -> Iterator[str]:
    def rows() -> Iterator[list[str]]:
        for model, formats in _MODELS.items():
            for slo in ("interactive", "fast"):
                for kind in _KINDS:
                    key = f"{slo}_{kind}_tokens_per_s_per_gpu"
                    values = [
                        _simulated(model, hardware, f"{model}-{hardware}_{key}") for hardware in _HARDWARE
                    ]
                    if any(values):
                        compared = [text(ratio(value, values[0]), ".1f") for value in values[1:]]
                        yield [f"{formats}, {slo}, {kind}", *(text(value) for value in values), *compared]

    return table(["model, formats", "H100", "GB200", "GB300", "GB200 / H100", "GB300 / H100"], rows())


def published() -> Iterator[str]:
    """Rates of published systems beside what the roofline says of a full step, as it is now."""
    shape, h100, gb200 = find_shape("deepseek-r1"), find_hardware("h100"), find_hardware("gb200")

    def decode(engine: Roofline, sequences: int, context: int) -> float:
        batch = sequences * engine.parallel.devices
        return sequences / engine.decode_step_s(batch, batch * context)

    def prompts(engine: Roofline) -> float:
        count = 8 * engine.parallel.devices
        return count * 2000 / engine.prefill_batch_s([(2000, 0)] * count) / engine.parallel.devices

    wide, h800, rack = Parallel(dp=72, ep=72), Parallel(dp=144, ep=144), Parallel(dp=48, ep=48)
    hopper = h100.model_copy(update={"scale_up_bytes_per_s": 200e9})
    fp4 = Roofline(shape, gb200, rack, Dtype.FP8, Dtype.FP8, expert_dtype=Dtype.NVFP4)
    rows = (
        ("SGLang, 2025-05, H100, EP 72, decode at 2,000 tokens of context, 256 sequences a GPU assumed", 2788,
         decode(Roofline(shape, h100, wide, Dtype.FP8), 256, 2000)),
        ("DeepSeek, 2025-03, H800, EP 144, decode at 4,989, 88 a GPU from the stated 20 to 22 tokens/s a user", 1850,
         decode(Roofline(shape, hopper, h800, Dtype.FP8), 88, 4989)),
        ("SGLang, 2025-09, GB200 NVL72, decode on 48 with NVFP4 experts, 768 a GPU assumed", 13_386,
         decode(fp4, 768, 2000)),
        ("the same with fp8 experts and bf16 KV", 9087,
         decode(Roofline(shape, gb200, rack, Dtype.FP8, Dtype.BF16), 768, 2000)),
        ("SGLang, H100, EP 32, prefill of 2,000-token prompts", 6538,
         prompts(Roofline(shape, h100, Parallel(dp=32, ep=32), Dtype.FP8))),
        ("SGLang, GB200, EP 8 assumed, prefill with NVFP4 experts", 26_156,
         prompts(Roofline(shape, gb200, Parallel(dp=8, ep=8), Dtype.FP8, expert_dtype=Dtype.NVFP4))),
        ("the same in fp8", 18_471, prompts(Roofline(shape, gb200, Parallel(dp=8, ep=8), Dtype.FP8))),
    )  # fmt: skip
    return table(
        ["published (tokens/s a GPU)", "found", "calculated", "ratio"],
        ([said, f"{found:,}", f"{model:,.0f}", f"{model / found:.2f}"] for said, found, model in rows),
    )


def hardware() -> Iterator[str]:
    def rows() -> Iterator[list[str]]:
        for name in ("h100", "h200", "gb200", "gb300"):
            entry = find_hardware(name)
            peaks = (entry.flops_per_s.get(dtype) for dtype in (Dtype.BF16, Dtype.FP8, Dtype.NVFP4))
            yield [
                name.upper(),
                " / ".join(text(peak and peak / 1e12, ",.0f") for peak in peaks),
                f"{entry.memory_bytes / 1e9:.0f}, {entry.bandwidth_bytes_per_s / 1e12:.3g}",
                f"{entry.scale_up_devices}, {entry.scale_up_bytes_per_s / 1e9:.0f}",
                f"{entry.scale_out_bytes_per_s / 1e9:.0f}",
                f"{entry.watts:,.0f}",
                f"{entry.usd_per_hour:.1f}",
            ]

    head = ["", "dense TFLOP/s bf16 / fp8 / NVFP4", "memory GB, TB/s", "NVLink GPUs, GB/s", "network GB/s", "watts a GPU", "USD/h"]  # fmt: skip
    return table(head, rows())


TABLES = {
    "deployments": simulated,
    "published": published,
    "hardware": hardware,
}
