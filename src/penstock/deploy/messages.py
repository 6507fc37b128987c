"""What a supervisor and its child processes tell each other, over a socket that only they have.

The child's end closing tells the supervisor that it is gone, and the other way round.
"""

from collections.abc import Callable

from penstock.core.ids import WorkerId
from penstock.core.types.cards import ModelCard
from penstock.core.types.instances import Role
from penstock.core.wire import Wire


class WorkerJob(Wire, frozen=True, tag="worker"):
    """`card` says what it serves, from the files in `model_dir`; `index` is its number among its role's workers.

    `device` is the number of its first device on this machine, `core` the CPU core of its engine, None for any;
    `adapters` are the LoRA adapters that it has.
    """

    worker_id: WorkerId
    role: Role
    card: ModelCard
    model_dir: str
    index: int = 0
    device: int = 0
    core: int | None = None
    adapters: tuple[str, ...] = ()


class FrontendJob(Wire, frozen=True, tag="frontend"):
    """`host` and `port` are what the supervisor holds; the graph's port may have been 0.

    `metrics_dir` is where several frontends put their figures together, empty for a single one.
    """

    host: str
    port: int
    metrics_dir: str = ""


Job = WorkerJob | FrontendJob


class Common(Wire, frozen=True):
    """What all processes of one run know: `secret` proves that they belong to it.

    They say that they are there every `heartbeat_interval_s`. `admin_token` and `api_keys` are what frontends ask of clients.
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
    api_keys: tuple[str, ...] = ()


class Assignment(Wire, frozen=True):
    """The supervisor's only message: all a child needs to know, secrets included (thus not in its arguments).

    `cores` are the CPU cores that it may use, all where none is named.
    """

    name: str
    job: Job
    common: Common
    cores: tuple[int, ...] = ()


class Ready(Wire, frozen=True, tag="ready"):
    """It serves; `detail` is for people."""

    detail: str = ""


class Failed(Wire, frozen=True, tag="failed"):
    """It gives up; where it is `config`, another try would end the same way."""

    message: str
    config: bool = False


class Beat(Wire, frozen=True, tag="beat"):
    """Its event loop runs; a worker's engine has finished so many `steps`, and may be in another one where it `has_requests`."""

    steps: int = 0
    has_requests: bool = False


class ProcessFailed(Wire, frozen=True, tag="process_failed"):
    """The supervisor tells a frontend, which counts it: the process of a name failed so often since it last told."""

    name: str
    reason: str
    count: int


Report = Ready | Failed | Beat
Tell = Callable[[Report], None]
