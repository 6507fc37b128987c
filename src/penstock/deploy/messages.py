"""What a supervisor and its child processes tell each other, over a socket that only they have.

The child's end closing tells the supervisor that it is gone, and the other way round.
"""

from penstock.core.ids import WorkerId
from penstock.core.types import Role
from penstock.core.wire import Wire


class WorkerJob(Wire, frozen=True, tag="worker"):
    worker_id: WorkerId
    role: Role


class FrontendJob(Wire, frozen=True, tag="frontend"):
    """`host` and `port` are what the supervisor holds; the graph's port may have been 0."""

    host: str
    port: int


class Assignment(Wire, frozen=True):
    """The supervisor's only message: all a child needs to know, secrets included (thus not in its arguments).

    `graph_json` is the whole `Graph`; the child is trusted and runs the same version.
    """

    name: str
    job: WorkerJob | FrontendJob
    graph_json: str
    hub_address: str
    hub_token: str
    hash_key: bytes
    log_level: str
    supervisor_pid: int


class Ready(Wire, frozen=True, tag="ready"):
    """It serves; `detail` is for people."""

    detail: str = ""


class Failed(Wire, frozen=True, tag="failed"):
    """It gives up; where it is `config`, another try would end the same way."""

    message: str
    config: bool = False


Report = Ready | Failed
