"""The compared systems: a model, devices of one kind of hardware, and number formats."""

from dataclasses import dataclass, field
from typing import Any

from penstock.perf.model.hardware import Hardware, find_hardware
from penstock.perf.search.demand import Demand
from penstock.plan.question import Question


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A model on devices, and its number formats; `speculation` is that of `penstock.plan.question`."""

    name: str
    model: str
    hardware_name: str
    devices: int
    formats: dict[str, str]
    speculation: dict[str, float] = field(default_factory=dict)

    @property
    def hardware(self) -> Hardware:
        return find_hardware(self.hardware_name)

    def ask(self, demand: Demand, *, devices: int | None = None) -> Question:
        """Make the plan's question for a demand, on another number of devices if given."""
        return Question(
            model=self.model,
            hardware=self.hardware,
            devices=devices or self.devices,
            demand=demand,
            formats=self.formats,
            speculation=self.speculation,
        )


_FP8 = {"weight_dtype": "fp8", "kv_dtype": "fp8"}
_8B: dict[str, Any] = {"model": "llama-3.1-8b", "formats": {"weight_dtype": "bfloat16"}, "devices": 8}
_70B: dict[str, Any] = {"model": "llama-3.1-70b", "formats": _FP8, "devices": 8}
_HOPPER: dict[str, Any] = {"model": "deepseek-r1", "formats": _FP8}
_BLACKWELL: dict[str, Any] = {"model": "deepseek-r1", "formats": {**_FP8, "expert_dtype": "nvfp4"}}
_MTP: dict[str, Any] = {"speculation": {"tokens_per_step": 1.8, "draft_tokens": 1}}

SIMULATED = (
    System(name="8b-h100", hardware_name="h100", **_8B),
    System(name="8b-gb200", hardware_name="gb200", **_8B),
    System(name="8b-gb300", hardware_name="gb300", **_8B),
    System(name="70b-h100", hardware_name="h100", **_70B),
    System(name="70b-gb200", hardware_name="gb200", **_70B),
    System(name="70b-gb300", hardware_name="gb300", **_70B),
    System(name="671b-h100", hardware_name="h100", devices=32, **_HOPPER),
    System(name="671b-gb200", hardware_name="gb200", devices=32, **_BLACKWELL),
    System(name="671b-gb300", hardware_name="gb300", devices=32, **_BLACKWELL),
)
"""Systems of one model have the same number of devices, from the slowest hardware to the fastest."""

CALCULATED = (
    System(name="h200-host", hardware_name="h200", devices=8, **_HOPPER),
    System(name="h200-host-mtp", hardware_name="h200", devices=8, **_HOPPER, **_MTP),
    System(name="h100-two-hosts", hardware_name="h100", devices=16, **_HOPPER),
    System(name="h100-wide", hardware_name="h100", devices=64, **_HOPPER),
    System(name="gb200", hardware_name="gb200", devices=72, **_BLACKWELL),
    System(name="gb300", hardware_name="gb300", devices=72, **_BLACKWELL),
    System(name="gb300-mtp", hardware_name="gb300", devices=72, **_BLACKWELL, **_MTP),
)
"""DeepSeek-R1 as it is calculated over interactivity; `mtp` drafts one token a step with multi-token prediction and yields 1.8,
at the 85 to 90 % acceptance of the second token in the DeepSeek-V3 technical report, section 5.4.3."""
