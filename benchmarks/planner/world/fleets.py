"""The models of the planner's benchmark on H100, with their targets."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.planner.world.cluster import Fleet
from benchmarks.planner.world.step_times import GridTimes
from benchmarks.runner import GraphFiles
from penstock.core.errors import ConfigError
from penstock.core.types.instances import Role
from penstock.graph import Overrides, load
from penstock.graph.engine_prices import make_roofline
from penstock.perf.model_config import find_shape
from penstock.perf.model_shape import Parallel
from penstock.perf.profile import Profile, ProfiledModel
from penstock.planner.capacity import Capacity, WorkerModel
from penstock.planner.demand import SloTargets
from penstock.sim.deployment import SimDeployment

_BLOCK_TOKENS = 64
_GRAPHS = {
    "8b": ("8b-h100-x8", "8b-h100-bf16-tp1"),
    "70b": ("70b-h100-tp4-x4", "70b-h100-bf16-tp4"),
}
SLOS = {"8b": SloTargets(ttft_s=1.0, itl_s=0.025), "70b": SloTargets(ttft_s=2.0, itl_s=0.05)}


@dataclass(frozen=True, slots=True)
class Model:
    """A model's workers, and the latency models that planners get."""

    name: str
    fleet: Fleet
    slo: SloTargets
    files: GraphFiles

    def deployment(self, replicas: Mapping[Role, int]) -> SimDeployment:
        """Plan static workers for the exact simulator: the default policy, one host of the fleet's bandwidth, and prefill workers that compute every prompt."""
        fleet = self.fleet
        settings = [
            f"router.topology.same_host={{latency_s: 1.0e-5, bandwidth_bytes_per_s: {fleet.kv_bytes_per_s:g}}}",
            "router.disagg.local_tokens_max=0",
            "router.disagg.remote_tokens_min=1",
        ]
        for role, count in ({Role.AGGREGATED: 0} | dict(replicas)).items():
            engine = {
                "replicas": count,
                "engine": "mock",
                "hardware": "h100",
                "locations": "[{host: node-1}]",
                "tensor_parallel": fleet.gpus,
                "max_batch_tokens": fleet.max_batch_tokens,
                "max_running_requests": fleet.requests_max,
            }
            settings += [f"roles.{role}.{name}={value}" for name, value in engine.items()]
        return replace(self.files, settings=tuple(settings)).deployment()

    def capacity(self, role: Role) -> Capacity:
        """Make the latency model of one role's workers."""
        return Capacity(
            role=role,
            model=WorkerModel(self.fleet.times, Parallel(tp=self.fleet.gpus)),
            max_batch_tokens=self.fleet.max_batch_tokens,
            block_size=_BLOCK_TOKENS,
            requests_max=self.fleet.requests_max,
        )


def find_model(name: str, examples: Path, *, slo: SloTargets | None = None) -> Model:
    """Make a model's fleet from its graph and profile under `examples`.

    Raises:
        ConfigError: a file cannot be read.
    """
    graph_name, profile = _GRAPHS[name]
    files = GraphFiles(examples / "graphs" / f"{graph_name}.yaml", examples / "profiles" / f"{profile}.json")
    graph = load(str(files.graph), Overrides([]))
    spec = graph.roles.present()[Role.AGGREGATED]
    shape = find_shape(graph.model)
    latency = ProfiledModel(Profile.load(files.profile), make_roofline(shape, spec))
    if spec.max_batch_tokens is None or spec.max_running_requests is None:
        raise ConfigError(
            f"{graph_name}: roles.aggregated: expected max_batch_tokens and max_running_requests"
        )
    fleet = Fleet(
        times=GridTimes(latency),
        gpus=spec.tensor_parallel,
        max_batch_tokens=spec.max_batch_tokens,
        requests_max=spec.max_running_requests,
        kv_bytes_per_token=latency.kv_bytes_per_token,
    )
    return Model(name, fleet, slo or SLOS[name], files)
