"""The deployments that are compared: a model on a kind of hardware, and how workers of it become a graph."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.bench.slower import slower_profile
from penstock.graph import Graph, Slo, build
from penstock.perf.catalogue import find_shape
from penstock.perf.hardware import Dtype, Hardware, find_hardware
from penstock.perf.parallel import Parallel
from penstock.perf.placement import Placement, parallelisms
from penstock.perf.roofline import Roofline
from penstock.perf.shape import ModelShape
from penstock.sim.deployment import Deployment, plan_deployment

_BLOCK_SIZE = 64
_INDEX_BLOCKS = 16_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A model on a kind of hardware, in the formats it is served in there."""

    name: str
    model: str
    hardware_name: str
    weights: str
    experts: str = "auto"
    kv: str = "auto"
    devices_max: int
    """Of one worker."""
    table: str | None = None
    """File with the reference table that its engines run on; None has them slower than the roofline says."""
    tensor: int | None = None
    """The table's tensor parallelism."""
    tokens_per_step: float = 1.0
    """Above 1 with speculation."""

    @property
    def likely(self) -> float:
        """Share of what the placements promise that its engines are likely to keep."""
        return 0.62 if self.table is None else 1.0

    @property
    def engines(self) -> str:
        """What its simulated engines run on."""
        return self.table or "roofline with worse factors (penstock.bench.slower)"

    @property
    def shape(self) -> ModelShape:
        return find_shape(self.model)

    @property
    def hardware(self) -> Hardware:
        return find_hardware(self.hardware_name)

    def price(self, parallel: Parallel) -> Roofline:
        """Give what the router and the placements take a worker for."""
        weights, experts, kv = (
            None if name == "auto" else Dtype(name) for name in (self.weights, self.experts, self.kv)
        )
        return Roofline(
            self.shape,
            self.hardware,
            parallel,
            weights,
            kv,
            tokens_per_step=self.tokens_per_step,
            expert_dtype=experts,
        )

    def choices(self) -> tuple[Parallel, ...]:
        if self.tensor is not None:
            return (Parallel(tp=self.tensor),)
        return tuple(parallelisms(self.shape, self.hardware, devices_max=self.devices_max))

    def graph(self, placement: Placement, *, replicas: int, slo: Slo, step_tokens: int) -> Graph:
        """Describe workers that run up to as many requests at once as the placement says.

        Args:
            placement: of one worker.
            replicas: how many.
            slo: the targets.
            step_tokens: prompt tokens a step may compute on each data-parallel rank beside decoding.
        """
        parallel = placement.parallel
        batch = -(-placement.batch // parallel.dp)
        role: dict[str, Any] = {
            "replicas": replicas,
            "engine": "mock",
            "hardware": self.hardware_name,
            "tensor_parallel": parallel.tp,
            "pipeline_parallel": parallel.pp,
            "data_parallel": parallel.dp,
            "expert_parallel": parallel.ep,
            "weight_dtype": "bfloat16" if self.weights == "bf16" else self.weights,
            "expert_dtype": self.experts,
            "kv_dtype": self.kv,
            "tokens_per_step": self.tokens_per_step,
            "max_running_requests": batch,
            "max_batch_tokens": batch + step_tokens,
        }
        return build(
            {
                "name": self.name,
                "model": self.model,
                "block_size": _BLOCK_SIZE,
                "router": {"policy": "kv", "indexed_blocks_max": _INDEX_BLOCKS},
                "roles": {"aggregated": role},
                "slo": slo.model_dump(),
            }
        )

    def deploy(self, graph: Graph, parallel: Parallel, *, profiles: Path, scratch: Path) -> Deployment:
        """Plan the graph with engines that are not what the router takes them for.

        Args:
            graph: of this system.
            parallel: its workers'.
            profiles: the directory with the reference tables.
            scratch: a directory for profiles that are made up.

        Raises:
            ConfigError: a table is missing, or nothing fits.
        """
        if self.table is not None:
            profile = profiles / self.table
        else:
            role = graph.roles.aggregated
            assert role is not None
            profile = scratch / f"{self.name}.json"
            batch = parallel.dp * (role.max_running_requests or 1)
            slower_profile(self.price(parallel), batch_max=batch).save(profile)
        return plan_deployment(graph, beside=profiles, engine_profile=profile)


_R1: dict[str, Any] = {"model": "deepseek-r1", "weights": "fp8", "kv": "fp8"}
_8B: dict[str, Any] = {"model": "llama-3.1-8b", "weights": "bf16", "devices_max": 1, "tensor": 1}
_70B: dict[str, Any] = {
    "model": "llama-3.1-70b", "weights": "fp8", "kv": "fp8", "devices_max": 2, "tensor": 2,
}  # fmt: skip

SIMULATED = (
    System(name="8b-h100", hardware_name="h100", table="8b-h100-bf16-tp1.json", **_8B),
    System(name="8b-gb200", hardware_name="gb200", **_8B),
    System(name="8b-gb300", hardware_name="gb300", **_8B),
    System(name="70b-h100", hardware_name="h100", table="70b-h100-fp8-tp2.json", **_70B),
    System(name="70b-gb200", hardware_name="gb200", table="70b-gb200-fp8-tp2.json", **_70B),
    System(name="70b-gb300", hardware_name="gb300", **_70B),
    System(name="671b-h100", hardware_name="h100", devices_max=64, **_R1),
    System(name="671b-gb200", hardware_name="gb200", experts="nvfp4", devices_max=72, **_R1),
    System(name="671b-gb300", hardware_name="gb300", experts="nvfp4", devices_max=72, **_R1),
)
"""In what follows each, those of one model go from the slowest hardware to the fastest."""

CALCULATED = (
    System(name="h200-host", hardware_name="h200", devices_max=8, **_R1),
    System(name="h200-host-mtp", hardware_name="h200", devices_max=8, tokens_per_step=1.8, **_R1),
    System(name="h100-two-hosts", hardware_name="h100", devices_max=16, **_R1),
    System(name="h100-wide", hardware_name="h100", devices_max=64, **_R1),
    System(name="gb200", hardware_name="gb200", experts="nvfp4", devices_max=72, **_R1),
    System(name="gb300", hardware_name="gb300", experts="nvfp4", devices_max=72, **_R1),
    System(name="gb300-mtp", hardware_name="gb300", experts="nvfp4", devices_max=72, tokens_per_step=1.8, **_R1),
)  # fmt: skip
"""DeepSeek-R1 as it is calculated over interactivity; `mtp` with the 1.8 tokens a step that multi-token prediction
yields at the 85 to 90 % acceptance of the second token in the DeepSeek-V3 technical report, section 5.4.3."""
