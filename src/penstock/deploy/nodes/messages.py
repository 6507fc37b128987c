"""Messages between the leader (node 0) of a worker over several nodes and its followers."""

from penstock.core.errors import ErrorInfo
from penstock.core.framing import Challenge, FrameCodec, Goodbye, Ping, Pong
from penstock.core.wire import Wire
from penstock.runtime.handshake import Hello, HelloReply
from penstock.runtime.session import SessionProtocol

JOIN_S = 60.0
"""Longest wait of a node for the others. After it the node logs which are missing, and tries again."""


class Join(Wire, frozen=True, tag="join"):
    """Ask the leader to admit a follower.

    Attributes:
        rank: of the follower, from 1.
        arguments: engine arguments as JSON, which must be equal on all nodes.
    """

    rank: int
    arguments: bytes


class Joined(Wire, frozen=True, tag="joined"):
    """Answer to `Join`; `error` says why the follower is refused, None if it is admitted."""

    error: ErrorInfo | None = None


class Start(Wire, frozen=True, tag="start"):
    """All nodes have joined: start the engine with this `master_port` on the leader."""

    master_port: int


class Leaving(Wire, frozen=True, tag="leaving"):
    """A follower is shutting down. It ends once the leader has closed the connection."""


Message = Challenge | Hello | HelloReply | Join | Joined | Start | Leaving | Ping | Pong | Goodbye

PROTOCOL: SessionProtocol[Message] = SessionProtocol(
    codec=FrameCodec(Message),
    server="leader",
    client="follower",
    frame_bytes_max=1 << 20,
    write_bytes_max=1 << 20,
    heartbeat_interval_s=3.0,
    heartbeat_timeout_s=15.0,
    connections_max=256,
)
"""A silent node is lost after `heartbeat_timeout_s`; one whose connection ends is lost at once."""
