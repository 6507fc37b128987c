"""How many workers each role of a deployment has, and what may change that."""

from enum import StrEnum

from penstock.core.types.instances import Role
from penstock.core.wire import Wire


class ReplicaState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    FLIPPING = "flipping"
    DRAINING = "draining"
    FAILED = "failed"


class Replica(Wire, frozen=True):
    """One worker.

    Attributes:
        role: the role that it has, or gets where it is flipping.
        phase: what it does while it is no worker that serves, such as `loads the engine`.
        age_s: seconds since its process began to start, or since it was ready.
        devices: indices of its devices on its machine.
        core: the CPU core of its engine; None without one of its own.
        template: the same of workers that were started with the same settings and model.
    """

    name: str
    role: Role
    state: ReplicaState
    phase: str = ""
    age_s: float = 0.0
    devices: tuple[int, ...] = ()
    core: int | None = None
    template: str = ""


class RoleLimit(Wire, frozen=True):
    """How many more workers a role may get.

    Attributes:
        room: workers that may be added now; None is no known limit.
        why: what limits them, with the fix.
        start_s: seconds that the last start of such a worker took; None before the first.
        owner: who else decides how many workers the role has, such as an autoscaler; empty is nobody.
    """

    role: Role
    room: int | None = None
    why: str = ""
    start_s: float | None = None
    owner: str = ""


class Scale(Wire, frozen=True):
    """The workers of a deployment at one moment.

    Attributes:
        sequence: grows with every change of a replica's state.
        revision: grows with every accepted `add`, `retire` and `flip`. A caller that gives the revision it has seen is
            refused if somebody else was faster.
        changed_by: who asked for the last of them; empty is the graph.
        replicas: in the order of their names; those that drain included.
        held: why no worker may leave or change its role now; empty where they may.
    """

    sequence: int
    revision: int
    changed_by: str = ""
    replicas: tuple[Replica, ...] = ()
    limits: tuple[RoleLimit, ...] = ()
    held: str = ""

    def of(self, role: Role) -> tuple[Replica, ...]:
        """Give the workers that have or get a role, without those that drain."""
        return tuple(
            replica
            for replica in self.replicas
            if replica.role is role and replica.state is not ReplicaState.DRAINING
        )

    def to_retire(self, role: Role, count: int) -> tuple[str, ...]:
        """Choose `count` workers of a role whose end costs least: failed, then starting, then the newest."""
        order = {ReplicaState.FAILED: 0, ReplicaState.STARTING: 1}
        chosen = sorted(self.of(role), key=lambda replica: (order.get(replica.state, 2), replica.age_s))
        return tuple(replica.name for replica in chosen[:count])
