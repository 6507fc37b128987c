"""The frames of a link. The first three are the handshake."""

from penstock.core.errors import ErrorInfo
from penstock.core.framing import Challenge, FrameCodec, Goodbye, Ping, Pong
from penstock.core.wire import Wire

FRAME_BYTES_MAX = 16 << 20
NOTIFICATION_BYTES_MAX = 1 << 20


class Greeting(Wire, frozen=True, tag="greeting"):
    """The initiator's answer to the challenge: its identity, and proof that it has the metadata and the secret."""

    version: int
    nonce: bytes
    proof: bytes
    name: str
    host: bytes = b""


class Welcome(Wire, frozen=True, tag="welcome"):
    """The listening side's answer: its own proof and the id of the link for streams; or the error that refuses the initiator."""

    proof: bytes = b""
    link_id: int = 0
    error: ErrorInfo | None = None


class TransportMessage(Wire, frozen=True, tag="transport"):
    """A message from one side's transport to the other side's transport of the same name."""

    transport: str
    payload: bytes


class Notification(Wire, frozen=True, tag="notification"):
    """A notification from user to user."""

    payload: bytes


class Withdrawn(Wire, frozen=True, tag="withdrawn"):
    """A region of the sender is deregistered: forget it, and answer when nothing here uses it any more."""

    region_id: int


class WithdrawnDone(Wire, frozen=True, tag="withdrawn_done"):
    """The answer to `Withdrawn`."""

    region_id: int


LinkFrame = (
    Challenge
    | Greeting
    | Welcome
    | TransportMessage
    | Notification
    | Withdrawn
    | WithdrawnDone
    | Ping
    | Pong
    | Goodbye
)


def link_codec() -> FrameCodec[LinkFrame]:
    return FrameCodec(LinkFrame)
