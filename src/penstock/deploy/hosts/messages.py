"""Messages between the supervisor that runs the planner and the supervisors of other hosts."""

from penstock.core.errors import ErrorInfo
from penstock.core.framing import Challenge, FrameCodec, Goodbye, Ping, Pong
from penstock.core.types.instances import Role, Scale
from penstock.core.wire import Wire
from penstock.deploy.control.messages import Add, Flip, Retire
from penstock.deploy.messages import RoundCounts
from penstock.runtime.handshake import Hello, HelloReply
from penstock.runtime.observations import Window
from penstock.runtime.session import SessionProtocol

SILENT_S = 10.0
"""A side that is silent for `SILENT_S` is lost. A host refuses an order that rests on a state older than `SILENT_S`."""


class HostState(Wire, frozen=True, tag="state"):
    """A host's workers, at each change and once a second.

    Attributes:
        number: counts the states of a connection; the first one has the host's name and asks to be taken.
        frontends: names of its frontends that are ready.
    """

    number: int
    scale: Scale
    frontends: tuple[str, ...] = ()
    host: str = ""


class HostAdmitted(Wire, frozen=True, tag="taken"):
    """Answers a host's first state; `error` says why the planner refuses the host."""

    error: ErrorInfo | None = None


class HostWindow(Wire, frozen=True, tag="seen"):
    """What one process of the host observed in one window."""

    source: str
    window: Window


class Order(Wire, frozen=True, tag="order"):
    """Asks a host for a change of its workers.

    Attributes:
        number: names the order in `OrderDone`.
        state: number of the last state that the planner had from the host.
        elsewhere: roles of workers that are ready on other hosts, so that the host's own last one may go.
    """

    number: int
    state: int
    change: Add | Retire | Flip
    elsewhere: tuple[Role, ...] = ()


class OrderDone(Wire, frozen=True, tag="done"):
    """Answers an order; `scale` is the host's scale after the order."""

    number: int
    scale: Scale
    names: tuple[str, ...] = ()
    error: ErrorInfo | None = None


class HostRound(Wire, frozen=True, tag="round"):
    """A round of the planner, for the metrics of a frontend."""

    planned: RoundCounts


Message = (
    Challenge | Hello | HelloReply | HostAdmitted | HostState | HostWindow | Order | OrderDone | HostRound
    | Ping | Pong | Goodbye
)  # fmt: skip

PROTOCOL: SessionProtocol[Message] = SessionProtocol(
    codec=FrameCodec(Message),
    server="planner",
    client="host",
    frame_bytes_max=1 << 20,
    write_bytes_max=1 << 20,
    heartbeat_interval_s=2.0,
    heartbeat_timeout_s=SILENT_S,
)
