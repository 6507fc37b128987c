"""Messages of the control channel: one JSON line each way on a connection of its own.

`version` is checked before the rest, so that another version's message is refused with a reason. A line that does not end
changes nothing.
"""

import msgspec

from penstock.core.errors import ErrorInfo
from penstock.core.types.instances import Role
from penstock.core.types.scaling import Scale
from penstock.core.wire import Wire
from penstock.planner.observe.observation import Observation

CONTROL_VERSION = 1
"""Increment it when an old peer could misread a message."""
LINE_BYTES_MAX = 1 << 20
SOCKET_NAME = "control.sock"


class Deployment(Wire, frozen=True):
    """Who answers: the graph's name, the frontends' URL and the supervisor's process.

    `planner_log` is the file of the planner's decisions; empty without a planner.
    """

    name: str
    url: str
    pid: int
    planner_log: str = ""


class GetScale(Wire, frozen=True, tag="scale"):
    """Asks for the workers; with `after`, once `Scale.sequence` exceeds it."""

    after: int | None = None


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


class Ask(Wire, frozen=True):
    """A request."""

    version: int
    body: GetScale | GetObservation | Add | Retire | Flip | Kill


class Told(Wire, frozen=True):
    """An answer: `scale` to `GetScale`, `observation` to `GetObservation`, `names` to `Add`, none to others; or `error` alone."""

    version: int = CONTROL_VERSION
    deployment: Deployment | None = None
    scale: Scale | None = None
    names: tuple[str, ...] = ()
    error: ErrorInfo | None = None
    observation: Observation | None = None


class Versioned(msgspec.Struct, frozen=True):
    """Reads the version alone."""

    version: int = 0
