"""Who a worker is."""

from dataclasses import dataclass, field
from typing import Any

from penstock.core.ids import WorkerId
from penstock.core.types.instances import Distance, Location, Role


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """Name, id, role and location of a worker. `engine` is its engine's name in the graph, for messages; `distance` as in `Instance`."""

    worker_id: WorkerId
    name: str
    role: Role = Role.AGGREGATED
    pid: int = 0
    engine: str = "of this worker"
    location: Location = field(default_factory=Location)
    distance: Distance | None = None

    def place(self) -> dict[str, Any]:
        """Give the fields of an `Instance` that say where it is."""
        return {**self.location.model_dump(), "distance": self.distance}
