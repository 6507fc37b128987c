"""The gRPC port of the endpoint picker: Envoy's external processing service, and gRPC health checks."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.core.errors import ConfigError
from penstock.core.log import get_logger
from penstock.frontend.config import EndpointPickerConfig, ServerTlsConfig
from penstock.frontend.endpoint_picker.exchange import EndpointPicker, EnvoyExchange
from penstock.frontend.endpoint_picker.messages import SERVICE, ProcessingRequest, ProcessingResponse
from penstock.frontend.limits.admission import ReceiveBudget

_READINESS = ("", "readiness", SERVICE)
_STOP_GRACE_S = 5.0
_MESSAGE_BYTES_MAX = 16 << 20
"""Envoy sends a buffered body as one message."""
_log = get_logger()


class EndpointPickerServer:
    """Serves a `EndpointPicker` until `close`."""

    def __init__(self, picker: EndpointPicker, config: EndpointPickerConfig, budget: ReceiveBudget) -> None:
        """Create the server; bodies count in `budget`."""
        self._config = config
        self._server = grpc.aio.server(
            options=[("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", _MESSAGE_BYTES_MAX)]
        )
        process = grpc.stream_stream_rpc_method_handler(
            _Processor(picker, budget).process,
            request_deserializer=ProcessingRequest.FromString,
            response_serializer=ProcessingResponse.SerializeToString,
        )
        handler = grpc.method_handlers_generic_handler(SERVICE, {"Process": process})
        self._server.add_generic_rpc_handlers((handler,))
        health_pb2_grpc.add_HealthServicer_to_server(_Health(picker), self._server)

    async def start(self) -> tuple[str, int]:
        """Listen.

        Returns:
            The address and the port; the system chooses the port if 0 is configured.

        Raises:
            ConfigError: the port is taken, the address is not this machine's, or the certificate cannot be read.
        """
        config = self._config
        where = f"{f'[{config.host}]' if ':' in config.host else config.host}:{config.port}"
        try:
            if config.tls is None:
                port = self._server.add_insecure_port(where)
            else:
                port = self._server.add_secure_port(where, _credentials(config.tls))
        except RuntimeError as error:
            raise ConfigError(
                f"endpoint_picker: cannot listen on {config.host} port {config.port}; stop what listens there, or choose"
                " another with --endpoint-picker-port"
            ) from error
        await self._server.start()
        return config.host, port

    async def close(self) -> None:
        """Stop listening; requests on their way get a few seconds."""
        await self._server.stop(_STOP_GRACE_S)


class _Processor:
    def __init__(self, picker: EndpointPicker, budget: ReceiveBudget) -> None:
        self._picker = picker
        self._budget = budget

    async def process(self, request_iterator: AsyncIterator[Any], _context: Any) -> AsyncIterator[Any]:
        exchange = EnvoyExchange(self._picker)
        with self._budget.hold(exchange.drop) as received:
            async for answer in exchange.answers(request_iterator, received):
                yield answer


class _Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # generated, without types
    def __init__(self, picker: EndpointPicker) -> None:
        self._picker = picker

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
        if request.service == "liveness":
            is_serving = True
        elif request.service in _READINESS:
            is_serving = self._picker.is_ready
        else:
            await context.abort(
                grpc.StatusCode.NOT_FOUND,
                f"no service {request.service!r}; known: liveness, readiness, {SERVICE}",
            )
        status = health_pb2.HealthCheckResponse.ServingStatus
        return health_pb2.HealthCheckResponse(status=status.SERVING if is_serving else status.NOT_SERVING)


def _credentials(tls: ServerTlsConfig) -> Any:
    """Read the certificate, and again for later connections when a file has changed.

    Raises:
        ConfigError: a file cannot be read.
    """
    first = _configuration(tls)
    times = _times(tls)

    def fetch() -> Any:
        nonlocal times
        try:
            now = _times(tls)
            if now == times:
                return None
            read = _configuration(tls)
        except (ConfigError, OSError) as error:
            _log.error(
                "certificate_not_reloaded", error=str(error), fix="mend the files; the ones before are used"
            )
            return None
        times = now
        return read

    return grpc.dynamic_ssl_server_credentials(first, fetch)


def _times(tls: ServerTlsConfig) -> tuple[int, ...]:
    return tuple(Path(name).expanduser().stat().st_mtime_ns for name in (tls.certificate, tls.key))


def _configuration(tls: ServerTlsConfig) -> Any:
    files = [Path(name).expanduser() for name in (tls.key, tls.certificate)]
    try:
        pair = tuple(file.read_bytes() for file in files)
    except OSError as error:
        raise ConfigError(f"endpoint_picker.tls: {error.filename}: {error.strerror}") from error
    return grpc.ssl_server_certificate_configuration([pair])
