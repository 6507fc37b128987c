"""Models on kinds of hardware: simulated at targets, calculated over interactivity, and what the model is held against."""

from collections.abc import Iterator

from penstock.perf.model.catalogue import find_shape
from penstock.perf.model.hardware import Dtype, find_hardware
from penstock.perf.model.parallel import Parallel
from penstock.perf.roofline.roofline import Roofline
from tables.read import NONE, figure, ratio, report, table, text

_HARDWARE = ("h100", "gb200", "gb300")
_MODELS = {
    "8b": "8B, bf16",
    "70b": "70B, fp8",
    "671b": "671B, fp8; NVFP4 experts on Blackwell",
}
_KINDS = ("aggregated", "disaggregated")
_FIGURES = {"tokens_per_s_per_gpu": "tokens/s a GPU", "tokens_per_joule": "tokens/J", "usd_per_million_tokens": "USD per million tokens"}  # fmt: skip
_CURVES = ("h200-host", "h200-host-mtp", "h100-two-hosts", "h100-wide", "gb200", "gb300", "gb300-mtp")
_SCALES = (8, 16, 32)
_PROMPTS = (2048, 12_000, 32_768, 100_000)


def _file(model: str, hardware: str) -> str:
    return f"deployments_{model}-{hardware}" if model == "671b" else f"deployments_{model}"


def _simulated(model: str, hardware: str, key: str) -> float | None:
    """Give a figure of a row; None where it was last made when pools were simulated separately and some engines were slower than expected."""
    file = _file(model, hardware)
    return figure(file, key) if "layouts" in report(file)["config"] else None


def _times(value: float | None) -> str:
    if not value:
        return NONE
    return f"{value:.1f}" if value >= 1 else f"1/{1 / value:.1f}"


def simulated() -> Iterator[str]:
    def rows() -> Iterator[list[str]]:
        for model, formats in _MODELS.items():
            for slo in ("interactive", "fast"):
                for kind in _KINDS:
                    label = f"{formats}, {slo}, {kind}"
                    for key, unit in _FIGURES.items():
                        values = [
                            _simulated(model, hardware, f"{model}-{hardware}_{slo}_{kind}_{key}")
                            for hardware in _HARDWARE
                        ]
                        if not any(values):
                            continue
                        compared = [_times(ratio(value, values[0])) for value in values[1:]]
                        yield [label, unit, *(text(value) for value in values), *compared]
                        label = ""

    return table(["model, formats", "", "H100", "GB200", "GB300", "GB200 / H100", "GB300 / H100"], rows())


def layouts() -> Iterator[str]:
    def rows() -> Iterator[list[str]]:
        for model in _MODELS:
            for hardware in _HARDWARE:
                named = report(_file(model, hardware))["config"].get("layouts", {})
                over = report(_file(model, hardware))["figures"]
                for slo in ("interactive", "fast"):
                    for kind in _KINDS:
                        key = f"{model}-{hardware}_{slo}_{kind}"
                        if key in named:
                            yield [
                                key.replace("_", ", "),
                                named[key] or NONE,
                                text(over.get(f"{key}_over_predicted"), ".2f"),
                            ]

    return table(["row", "layout", "simulated over predicted rate"], rows())


def by_size() -> Iterator[str]:
    def rows() -> Iterator[list[str]]:
        for model, said in (("8b", "8B"), ("70b", "70B fp8")):
            keys = [f"{model}-h100_goodput_rps_per_gpu_x{devices}" for devices in _SCALES]
            yield [said, *(text(_simulated(model, "h100", key)) for key in keys)]

    return table(["GPUs", *map(str, _SCALES)], rows())


def curve(workload: str, said: str) -> Iterator[str]:
    found = report("deployments_curves")
    samples = found["samples"] if "layouts" in found["config"] else {}
    targets = [round(target) for target in samples.get("curve_tokens_per_s_per_user", ())]
    points = {name: samples.get(f"curve_{workload}_{name}_tokens_per_s_per_gpu", ()) for name in _CURVES}

    def over(one: str, other: str, key: str | None) -> list[str]:
        cost = [getattr(find_hardware(name.split("-")[0]), key) if key else 1.0 for name in (one, other)]
        pairs = zip(points[one], points[other], strict=True)
        return [text(ratio(a / cost[0], b / cost[1]), ",.1f") for a, b in pairs]

    def rows() -> Iterator[list[str]]:
        for name in _CURVES:
            yield [f"`{name}`", *(text(value or None, ",.0f") for value in points[name])]
        for other in ("h200-host", "h100-two-hosts", "h100-wide"):
            yield [f"*tokens/s, `gb200` / `{other}`*", *over("gb200", other, None)]
        for unit, key in (("J", "watts"), ("USD", "usd_per_hour")):
            for other in ("h200-host", "h200-host-mtp"):
                yield [f"*tokens/{unit}, `gb300-mtp` / `{other}`*", *over("gb300-mtp", other, key)]

    return table([f"{said}; tokens/s a user:", *map(str, targets)], rows())


def prefill() -> Iterator[str]:
    """What one prompt takes alone, by the roofline as it is now."""
    h100, gb200, shape = find_hardware("h100"), find_hardware("gb200"), find_shape("deepseek-r1")
    engines = {
        "H100, EP 16": Roofline(shape, h100, Parallel(dp=16, ep=16), Dtype.FP8),
        "H100, TP 8 x PP 2": Roofline(shape, h100, Parallel(tp=8, pp=2), Dtype.FP8),
        "GB200, EP 72": Roofline(shape, gb200, Parallel(dp=72, ep=72), Dtype.FP8, expert_dtype=Dtype.NVFP4),
        "GB200, TP 4": Roofline(shape, gb200, Parallel(tp=4), Dtype.FP8, expert_dtype=Dtype.NVFP4),
    }
    head = ["seconds of prefill, alone, for prompts of", *(f"{tokens:,}" for tokens in _PROMPTS)]
    return table(
        head,
        ([name, *(text(engine.prefill_s(n), ".2f") for n in _PROMPTS)] for name, engine in engines.items()),
    )


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
    "deployments-layouts": layouts,
    "deployments-by-size": by_size,
    "curve-1k": lambda: curve("1k_1k", "1,024 in, 1,024 out"),
    "curve-8k": lambda: curve("8k_1k", "8,192 in, 1,024 out"),
    "prefill": prefill,
    "published": published,
    "hardware": hardware,
}
