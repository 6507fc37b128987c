"""Who a worker is."""

from dataclasses import dataclass, field

from penstock.core.ids import WorkerId
from penstock.core.types.instances import Role
from penstock.core.types.location import Location


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """Name, id, role and location of a worker. `engine` is its engine's name in the graph, for messages."""

    worker_id: WorkerId
    name: str
    role: Role = Role.AGGREGATED
    pid: int = 0
    engine: str = "of this worker"
    location: Location = field(default_factory=Location)
