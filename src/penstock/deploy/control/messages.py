"""Messages of the control channel: one JSON line each way on a connection of its own.

`version` is checked before the rest, so that another version's message is refused with a reason. A line that does not end
changes nothing.
"""

import msgspec

from penstock.core.errors import ErrorInfo
from penstock.core.types.instances import Replica, ReplicaState, Role, Scale
from penstock.core.wire import Wire
from penstock.planner.observation import Observation

CONTROL_VERSION = 1
"""Increment it when an old peer could misread a message."""
LINE_BYTES_MAX = 1 << 20
SOCKET_NAME = "control.sock"


class RunningDeployment(Wire, frozen=True):
    """The deployment that answers: the graph's name, the frontends' URL and the supervisor's process.

    `planner_log` is the file of the planner's decisions; empty without a planner. `spans_hosts`: other hosts may run parts of it.
    """

    name: str
    url: str
    pid: int
    planner_log: str = ""
    spans_hosts: bool = False


class ProcessView(Wire, frozen=True):
    """A process of the deployment, as people see it: a frontend, which has no role, or a worker.

    Attributes:
        pid: None while none runs.
        phase: what it does while it does not serve.
        age_s: seconds since the process became ready; before that, since its start began.
        template: digest of settings and model; workers that were started with the same ones have the same.
        region: the region that a link leads to; empty where the process is no link.
    """

    name: str
    pid: int | None
    state: ReplicaState
    role: Role | None = None
    phase: str = ""
    age_s: float = 0.0
    devices: tuple[int, ...] = ()
    core: int | None = None
    template: str = ""
    region: str = ""

    @classmethod
    def of(cls, replica: Replica, pid: int | None) -> "ProcessView":
        """Describe a worker's process."""
        return cls(
            name=replica.name,
            pid=pid,
            state=replica.state,
            role=replica.role,
            phase=replica.phase,
            age_s=replica.age_s,
            devices=replica.devices,
            core=replica.core,
            template=replica.template,
        )


class GetScale(Wire, frozen=True, tag="scale"):
    """Asks for the workers; with `after`, once `Scale.sequence` exceeds it."""

    after: int | None = None


class GetProcesses(Wire, frozen=True, tag="processes"):
    """Asks for the processes of this host."""


class Difference(Wire, frozen=True):
    """A field that differs between the running graph and a changed one.

    Attributes:
        role: whose field; `all` for those of the whole graph.
        field: its path; empty for the role itself.
        action: what is done; empty where it is refused.
        refusal: why it cannot be changed in place; empty where it can.
    """

    role: str
    field: str
    old: str
    new: str
    action: str = ""
    refusal: str = ""


class Apply(Wire, frozen=True, tag="apply"):
    """Asks for what another graph would change, and unless `dry_run` to change it, while requests go on."""

    graph_json: str
    dry_run: bool


class GetRollout(Wire, frozen=True, tag="rollout"):
    """Asks how the last rollout goes, once it has more lines than `after`, or has ended."""

    after: int = 0


class RolloutView(Wire, frozen=True):
    """A rollout.

    Attributes:
        number: counts the rollouts of a deployment; 0 before the first.
        lines: what it has done, from its beginning on.
        is_over: whether it has ended.
        error: why it has failed; None where it has not.
    """

    number: int
    lines: tuple[str, ...] = ()
    is_over: bool = True
    error: ErrorInfo | None = None


class GetObservation(Wire, frozen=True, tag="observation"):
    """Asks for what was seen in the last `seconds`."""

    seconds: float


class Add(Wire, frozen=True, tag="add"):
    role: Role
    count: int
    by: str
    revision: int | None = None


class Retire(Wire, frozen=True, tag="retire"):
    names: tuple[str, ...]
    by: str
    revision: int | None = None


class Flip(Wire, frozen=True, tag="flip"):
    name: str
    role: Role
    by: str
    revision: int | None = None


class Kill(Wire, frozen=True, tag="kill"):
    """Kills a worker's process, as a crash would; for demonstrations."""

    name: str


ControlBody = GetScale | GetObservation | GetProcesses | GetRollout | Apply | Add | Retire | Flip | Kill


class ControlRequest(Wire, frozen=True):
    """A request on the control socket."""

    version: int
    body: ControlBody


class ControlAnswer(Wire, frozen=True):
    """An answer: `scale` to `GetScale`, `observation` to `GetObservation`, `processes` to `GetProcesses`, `differences` and `rollout` to `Apply`, `rollout` to `GetRollout`, `names` to `Add`, none to others; or `error` alone."""

    version: int = CONTROL_VERSION
    deployment: RunningDeployment | None = None
    scale: Scale | None = None
    names: tuple[str, ...] = ()
    error: ErrorInfo | None = None
    observation: Observation | None = None
    processes: tuple[ProcessView, ...] = ()
    differences: tuple[Difference, ...] = ()
    rollout: RolloutView | None = None


class Versioned(msgspec.Struct, frozen=True):
    """Reads the version alone."""

    version: int = 0
