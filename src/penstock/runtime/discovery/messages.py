"""Messages between the local hub and its clients."""

from penstock.core.errors import ErrorInfo
from penstock.core.ids import WorkerId
from penstock.core.net.framing import FrameCodec, Goodbye, Ping, Pong
from penstock.core.net.handshake import Challenge
from penstock.core.types.instances import Instance, InstanceChange
from penstock.core.wire import Wire
from penstock.runtime.config import DiscoveryConfig
from penstock.runtime.handshake import Hello, HelloReply
from penstock.runtime.session import SessionProtocol


class Welcome(Wire, frozen=True, tag="welcome"):
    """The hub's first message to an accepted client; a restarted hub has another `hub_id`."""

    hub_id: str
    lease_ttl_s: float


class Register(Wire, frozen=True, tag="register"):
    """Register or update an instance; `Registered` answers."""

    instance: Instance


class Registered(Wire, frozen=True, tag="registered"):
    worker_id: WorkerId
    error: ErrorInfo | None = None


class Renew(Wire, frozen=True, tag="renew"):
    """Renew these leases for another `lease_ttl_s`; `Lapsed` lists those that have expired already."""

    worker_ids: tuple[WorkerId, ...]


class Lapsed(Wire, frozen=True, tag="lapsed"):
    worker_ids: tuple[WorkerId, ...]


class Withdraw(Wire, frozen=True, tag="withdraw"):
    worker_id: WorkerId


class Watch(Wire, frozen=True, tag="watch"):
    """Subscribe: the hub sends all present instances, then `WatchSynced`, then every change."""


class Change(Wire, frozen=True, tag="change"):
    change: InstanceChange


class Refusals(Wire, frozen=True, tag="refusals"):
    """Sent to clients that watch: `count` clients were refused since the hub's start, for another secret, hash key or release."""

    count: int


HubMessage = (
    Challenge | Hello | HelloReply | Welcome | Register | Registered | Renew | Lapsed | Withdraw | Watch | Change
    | Refusals | Ping | Pong | Goodbye
)  # fmt: skip

CODEC: FrameCodec[HubMessage] = FrameCodec(HubMessage)


def hub_protocol(config: DiscoveryConfig) -> SessionProtocol[HubMessage]:
    return SessionProtocol(
        codec=CODEC,
        server="hub",
        client="client",
        frame_bytes_max=config.frame_bytes_max,
        write_bytes_max=config.frame_bytes_max,
        heartbeat_interval_s=config.lease_ttl_s / 3,
        heartbeat_timeout_s=config.lease_ttl_s,
        connect_timeout_s=config.connect_timeout_s,
        connections_max=config.connections_max,
    )
