"""Messages between a supervisor and its child processes, over a private socket pair.

Each side learns of the other's end from the closed socket.
"""

from collections.abc import Callable

import msgspec

from penstock.core.errors import ConfigError, ErrorInfo, PenstockError, Unavailable, WrongServerError
from penstock.core.ids import WorkerId
from penstock.core.types.instances import ModelCard, Role
from penstock.core.wire import Wire
from penstock.kv.host_arena import HostPart
from penstock.planner.record import Expected
from penstock.runtime.observations import Window

WINDOW_S = 1.0
"""Seconds of a window of `Observed`."""


class WorkerJob(Wire, frozen=True, tag="worker"):
    """Job of a worker process.

    `role` is the role that it registers with; `home` is the role in the graph whose settings it has, None is `role`: they
    differ after a change of role. `card` is the model it serves, from the files in `model_dir`. `index` is its number among
    its home's workers. `device` is the index of its first device on this machine. `core` is the CPU core of its engine, None
    for any. `ports` are for requests and KV transfers, none for any free ones. `adapters` are its LoRA adapters. `host_part` is its part of the memory that workers share for KV, None without.
    `region` is the other region that it is the link to; empty for workers of this one.
    """

    worker_id: WorkerId
    role: Role
    card: ModelCard
    model_dir: str
    index: int = 0
    device: int = 0
    core: int | None = None
    ports: tuple[int, ...] = ()
    adapters: tuple[str, ...] = ()
    host_part: HostPart | None = None
    home: Role | None = None
    region: str = ""


class FrontendJob(Wire, frozen=True, tag="frontend"):
    """Job of a frontend process. `host` and `port` are reserved by the supervisor; the graph's port may have been 0.

    `metrics_dir` is PROMETHEUS_MULTIPROC_DIR of several frontends; empty for one.
    """

    host: str
    port: int
    metrics_dir: str = ""


class FollowerJob(Wire, frozen=True, tag="follower"):
    """Job of a process on a node that follows: it runs the engine's processes of this node.

    Attributes:
        role: of the worker.
        rank: of this node among the worker's, from 1.
        model_dir: the model's files here.
        device: index of the first of its devices on this machine.
    """

    role: Role
    rank: int
    model_dir: str
    device: int = 0


Job = WorkerJob | FrontendJob | FollowerJob


class ProcessSettings(Wire, frozen=True):
    """Data of all processes of one run; `secret` authenticates them to each other.

    `hub_address` is of the registry. Workers listen at `listen`, empty for private sockets, and register `advertise` as their
    host, empty for that of `listen`. Each process sends a heartbeat every `heartbeat_interval_s`. Frontends require `admin_token` of clients of `/admin`.
    """

    graph_json: str
    runtime_dir: str
    hub_address: str
    secret: bytes
    hash_key: bytes
    log_level: str
    supervisor_pid: int
    heartbeat_interval_s: float
    admin_token: str = ""
    listen: str = ""
    advertise: str = ""


class Assignment(Wire, frozen=True):
    """The first message to a child: its job, with secrets, which must not be in its arguments.

    `cores` are the CPU cores it may use; empty is all.
    """

    name: str
    job: Job
    common: ProcessSettings
    cores: tuple[int, ...] = ()


class Ready(Wire, frozen=True, tag="ready"):
    """The process serves; `detail` is printed. `needs_prefill`: as a decode worker it computes no prompts itself.

    Attributes:
        kv_tiers: a line for each KV tier, what speed it needs and has; printed too.
    """

    detail: str = ""
    needs_prefill: bool = False
    kv_tiers: tuple[str, ...] = ()


class StartPhase(Wire, frozen=True, tag="phase"):
    """What a starting process does now, such as `loads the engine`."""

    what: str


class WorkerRoleChanged(Wire, frozen=True, tag="role_changed"):
    """A worker takes requests in another role; or it does not, and `problem` says why, as asked by `ChangeRole`."""

    role: Role
    problem: ErrorInfo | None = None


class Observed(Wire, frozen=True, tag="observed"):
    """What the process has seen since its last window; sent every `WINDOW_S` once it is ready. One that finds no room is lost."""

    window: Window


class Failed(Wire, frozen=True, tag="failed"):
    """The process ends with an error.

    `config`: a restart would fail the same way. `outside`: what it needs is not of this deployment, such as a running server;
    with `config` that is there, and the wrong one.
    """

    message: str
    config: bool = False
    outside: bool = False


class Health(Wire, frozen=True, tag="health"):
    """A worker's engine cannot serve for now; `problem` says why. Empty: it can again."""

    problem: str = ""


class Closing(Wire, frozen=True, tag="closing"):
    """A worker closes its engine, the last thing it does."""


class ProcessHeartbeat(Wire, frozen=True, tag="beat"):
    """Heartbeat of the event loop, with the number of finished `steps` of a worker's engine and whether it `has_requests`."""

    steps: int = 0
    has_requests: bool = False


class ProcessFailed(Wire, frozen=True, tag="process_failed"):
    """Sent to a frontend, which counts it in its metrics: process `name` failed `count` times for `reason`."""

    name: str
    reason: str
    count: int


class ChangeRole(Wire, frozen=True, tag="change_role"):
    """Asks a worker to change its role; it answers `WorkerRoleChanged`."""

    role: Role


class Drain(Wire, frozen=True, tag="drain"):
    """Tells a worker how long its requests may take when it drains, instead of `worker.drain_timeout_s`; SIGTERM follows."""

    timeout_s: float


class RoundCounts(Wire, frozen=True, tag="planned"):
    """Sent to a frontend, for its metrics: a round of the planner.

    Attributes:
        outcome: as of `DecisionRecord`, or failed.
        seconds: how long it took.
        have: workers that count; `wanted` those that are aimed at.
        changes: workers by change: add, retire or flip.
        lost: rounds that the planner's log could not keep since the last message.
        refused_hosts: connections of hosts that the planner refused since the last message.
        gpu_watts: what the GPUs of a role's workers draw, where NVML tells; `gpu_utilization` is their mean share of busy time.
    """

    outcome: str
    seconds: float
    have: dict[Role, int] = msgspec.field(default_factory=dict)
    wanted: dict[Role, int] = msgspec.field(default_factory=dict)
    changes: dict[str, int] = msgspec.field(default_factory=dict)
    expected: tuple[Expected, ...] = ()
    has_shortfall: bool = False
    lost: int = 0
    gpu_watts: dict[Role, float] = msgspec.field(default_factory=dict)
    gpu_utilization: dict[Role, float] = msgspec.field(default_factory=dict)
    refused_hosts: int = 0


ProcessOrder = ProcessFailed | ChangeRole | RoundCounts | Drain
"""Messages from a supervisor to a child process, after the assignment."""
Report = Ready | Failed | Health | Closing | ProcessHeartbeat | StartPhase | WorkerRoleChanged | Observed
Tell = Callable[[Report], None]


def cause_of(error: BaseException) -> BaseException:
    """Give the first PenstockError in nested groups, else a sole other error, else the group."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    causes = [cause_of(inner) for inner in error.exceptions]
    clear = next((cause for cause in causes if isinstance(cause, PenstockError)), None)
    return clear or (causes[0] if len(causes) == 1 else error)


def report_of(error: BaseException) -> Failed:
    """Make the report of a process that an error ends."""
    cause = cause_of(error)
    if not isinstance(cause, PenstockError):
        return Failed(message=f"{type(cause).__name__}: {cause}")
    return Failed(
        message=cause.message,
        config=isinstance(cause, ConfigError),
        outside=isinstance(cause, (Unavailable, WrongServerError)),
    )
