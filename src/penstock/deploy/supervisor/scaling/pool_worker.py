"""One worker of the pool: what it was given, and its process."""

import asyncio
from dataclasses import dataclass, field

from penstock.core.types.instances import Replica, ReplicaState, Role
from penstock.deploy.supervisor.member import Member

WORKER_NAMES = {Role.AGGREGATED: "worker", Role.PREFILL: "prefill", Role.DECODE: "decode"}


@dataclass(slots=True, eq=False)
class PoolWorker:
    """A worker and its share of the machine. The pool owns it."""

    home: Role
    """The role in the graph whose settings it has."""
    index: int
    """Its number among the workers of its home; a number is free again when its processes have ended."""
    role: Role
    """The role that it has now."""
    devices: tuple[int, ...] = ()
    core: int | None = None
    ports: tuple[int, ...] = ()
    """Where it listens for requests and for KV transfers; none for any free ports."""
    target: Role | None = None
    """The role that it is to get; None while it does not change."""
    flips: set["asyncio.Future[None]"] = field(default_factory=set)
    """Callers that wait for the change of role."""
    member: Member | None = None
    template: str = ""
    """Key of the template by which its processes are started."""

    @property
    def name(self) -> str:
        return f"{WORKER_NAMES[self.home]}-{self.index + 1}"

    @property
    def running(self) -> Member:
        assert self.member is not None, "in the pool"
        return self.member

    @property
    def is_draining(self) -> bool:
        return self.running.is_stopping

    @property
    def answers(self) -> bool:
        """Whether requests may be sent to it once it is ready."""
        return not self.is_draining and Role.PREFILL not in {self.role, self.target}

    @property
    def is_serving(self) -> bool:
        """Whether it answers requests now."""
        return self.answers and self.target is None and self.running.ready.is_set()

    def replica(self, now_s: float) -> Replica:
        """Describe it at loop time `now_s`."""
        member = self.running
        return Replica(
            name=self.name,
            role=self.target or self.role,
            state=self._state(),
            phase=f"becomes {self.target}, was {self.role}" if self.target is not None else member.phase,
            age_s=member.age_s(now_s),
            devices=self.devices,
            core=self.core,
            template=self.template,
        )

    def _state(self) -> ReplicaState:
        state = self.running.state
        return ReplicaState.FLIPPING if state is ReplicaState.READY and self.target is not None else state
