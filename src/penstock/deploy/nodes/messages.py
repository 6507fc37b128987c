"""Messages between the node that leads a worker and those that follow."""

from penstock.core.errors import ErrorInfo
from penstock.core.net.framing import FrameCodec, Goodbye, Ping, Pong
from penstock.core.net.handshake import Challenge
from penstock.core.wire import Wire
from penstock.runtime.handshake import Hello, HelloReply

FRAME_BYTES_MAX = 1 << 20
HEARTBEAT_S, SILENT_S = 3.0, 15.0
"""A node that is silent for `SILENT_S` is lost. One whose process has ended is lost at once."""
JOIN_S = 60.0
"""Longest time in which the nodes of a worker find each other; then they say whom they miss, and try again."""


class Join(Wire, frozen=True, tag="join"):
    """A follower asks to be taken.

    Attributes:
        rank: its number among the nodes, from 1.
        arguments: of its engine as JSON, which have to be equal on all nodes.
    """

    rank: int
    arguments: bytes


class Joined(Wire, frozen=True, tag="joined"):
    """Answers `Join`; `error` says why the follower is not taken."""

    error: ErrorInfo | None = None


class Start(Wire, frozen=True, tag="start"):
    """All nodes are there: start the engine's processes, which meet at this port of the leader."""

    master_port: int


class Leaving(Wire, frozen=True, tag="leaving"):
    """A follower is told to end, and does once the leader has closed the connection."""


Message = Challenge | Hello | HelloReply | Join | Joined | Start | Leaving | Ping | Pong | Goodbye

CODEC: FrameCodec[Message] = FrameCodec(Message)
