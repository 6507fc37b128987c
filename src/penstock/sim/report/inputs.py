"""The inputs of a simulation, so that a report can be reproduced."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock import __version__
from penstock.sim.deployment import Deployment
from penstock.sim.role_group import RoleGroup
from penstock.sim.scaling.scaled_cluster import START_S


@dataclass(frozen=True, slots=True)
class Inputs:
    """Inputs beside the graph file.

    workload:  workload file
    changes:   graph fields set by flags, by dotted path
    workload_flags: flags that change the workload, as given
    profile:   profile of all engines; None for the roles' profiles or the roofline
    start_s:   seconds that a worker takes to start, where the graph has a planner
    """

    workload: Path
    seed: int
    changes: Mapping[str, Any] = field(default_factory=dict)
    workload_flags: Mapping[str, Any] = field(default_factory=dict)
    profile: Path | None = None
    start_s: float = START_S

    @property
    def heading(self) -> str:
        """Changes to the graph and the profile, as text; empty without any."""
        said = [f"{place}={value}" for place, value in self.changes.items()]
        if self.profile is not None:
            said.append(f"engines on the profile {self.profile.name}")
        return ", ".join(said)

    def report(self, deployment: Deployment, graph_file: str) -> dict[str, Any]:
        """Make the report's block `inputs`: file names without directories, devices of the decoding workers."""
        graph, role_group = deployment.graph, deployment.decoding[0]
        profile, file = role_group.profile, self.profile or role_group.spec.profile
        return {
            "version": __version__,
            "workload": self.workload.name,
            "workload_flags": dict(self.workload_flags),
            "seed": self.seed,
            "exact": deployment.exact,
            "graph": Path(graph_file).name,
            "set": dict(self.changes),
            "policy": graph.router.policy,
            "slo": None if graph.slo is None else graph.slo.model_dump(mode="json"),
            "hardware": role_group.hardware.name,
            "devices": deployment.devices,
            "usd_per_hour": role_group.hardware.usd_per_hour,
            "watts": role_group.hardware.watts,
            "tokens_per_step": role_group.spec.tokens_per_step,
            "worker_start_s": None if graph.planner is None else self.start_s,
            "engine_profile": profile
            and {
                "file": file and Path(file).name,
                "engine": profile.engine,
                "model": profile.model,
                "hardware": profile.hardware,
                "tensor_parallel": profile.tensor_parallel,
                "machine": profile.machine,
            },
        }


def mismatches(deployment: Deployment) -> list[str]:
    """List profiles whose model, hardware or parallelism differs from the deployment's."""
    return [
        text
        for role_group in deployment.role_groups
        if (text := _mismatch(role_group, deployment)) is not None
    ]


def _mismatch(role_group: RoleGroup, deployment: Deployment) -> str | None:
    profile, role, graph = role_group.profile, role_group.spec, deployment.graph
    if profile is None:
        return None
    names = {graph.model, Path(graph.model).name, graph.served_name, deployment.shape.name}
    sides = (
        ("model", profile.model, profile.model in names, graph.model),
        (
            "hardware",
            profile.hardware,
            profile.hardware == role_group.hardware.name,
            role_group.hardware.name,
        ),
        (
            "tensor_parallel",
            profile.tensor_parallel,
            profile.tensor_parallel == role.tensor_parallel,
            role.tensor_parallel,
        ),
    )
    differ = [f"{name} {theirs} for {ours}" for name, theirs, same, ours in sides if theirs and not same]
    return f"the profile is of another engine: {', '.join(differ)}" if differ else None
