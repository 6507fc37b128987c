"""The request plane over TCP: a listening worker, and connections of frontends to workers."""

from dataclasses import replace

from penstock.core.errors import ConfigError, WorkerLost
from penstock.core.listening import Address
from penstock.core.types.instances import Instance
from penstock.runtime.config import PlaneConfig
from penstock.runtime.handshake import Identity
from penstock.runtime.requests.frontend_peer import FrontendPeer
from penstock.runtime.requests.outbox import request_protocol
from penstock.runtime.requests.worker_peer import WorkerPeer
from penstock.runtime.session import SessionServer
from penstock.runtime.tls import PlaneTls
from penstock.seams import EventCarrier, WorkerService, WorkerSink


class TcpPlane:
    """Connects processes, on one host or many."""

    def __init__(
        self,
        identity: Identity | None = None,
        *,
        listen: str = "tcp://127.0.0.1:0",
        advertise_host: str | None = None,
        tls: PlaneTls | None = None,
        config: PlaneConfig | None = None,
        carrier: EventCarrier | None = None,
    ) -> None:
        """Make a plane; `serve` listens, `connect` connects.

        Args:
            identity: identity of this process, with the deployment's secret and hash key.
            listen: where `serve` listens, `tcp://HOST:PORT` or `unix:///PATH`.
            advertise_host: host name to register, if it differs from the one in `listen`.
            tls: certificates for TCP; None for no TLS.
            config: bounds and times.
            carrier: brings new KV events and load reports from workers to frontends; None: the connections do.

        Raises:
            ConfigError: `listen` is no address, or other machines can reach it while there is no secret.
        """
        self._identity = identity or Identity()
        self._listen = Address.parse(listen, source="listen")
        if not self._identity.secret and not self._listen.is_local:
            raise ConfigError(
                f"listen: {self._listen}: other machines reach this address, and without a secret anyone could send"
                " requests; give every process the deployment's secret, or listen on 127.0.0.1"
            )
        self._advertise_host = advertise_host
        self._tls = tls
        self._config = config or PlaneConfig()
        self._carrier = carrier

    async def serve(self, service: WorkerService) -> "TcpServer":
        """Listen for frontends.

        Raises:
            ConfigError: the address is in use, not allowed or not of this host.
        """
        repair_interval_s = None
        if self._carrier is not None and self._identity.worker_id is not None:
            repair_interval_s = self._carrier.repair_interval_s
            service.broadcast_to(self._carrier.sink(self._identity.worker_id))
        server: SessionServer[FrontendPeer] = SessionServer(
            request_protocol(self._config),
            self._identity,
            self._listen,
            lambda server: FrontendPeer(service, self._config, server, repair_interval_s),
            tls=self._tls,
            on_refused=lambda _peer, _error: service.refused("tls"),
        )
        await server.start()
        address = replace(server.address, host=self._advertise_host or server.address.host)
        return TcpServer(server, str(address), self._config.close_timeout_s)

    async def connect(self, instance: Instance, sink: WorkerSink) -> WorkerPeer:
        address = Address.parse(instance.address, source=f"worker {instance.name}")
        peer = WorkerPeer(instance, sink, self._identity, self._config, self._carrier)
        try:
            await peer.connect(address, self._tls)
        except (OSError, TimeoutError) as error:
            reason = (
                f"no answer within {self._config.connect_timeout_s:g} s (connect_timeout_s)"
                if isinstance(error, TimeoutError)
                else error.strerror or str(error)
            )
            raise WorkerLost(
                f"worker {instance.name} at {instance.address}: {reason}; it has probably gone: try another"
            ) from error
        return peer


class TcpServer:
    """A worker's listening end."""

    def __init__(self, server: SessionServer[FrontendPeer], address: str, close_timeout_s: float) -> None:
        self.address = address
        self._server = server
        self._close_timeout_s = close_timeout_s

    async def close(self) -> None:
        await self._server.close("the worker closes", self._close_timeout_s)
