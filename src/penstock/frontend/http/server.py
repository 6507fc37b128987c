"""The listening socket of a frontend process: opens the port, and drains requests on close."""

import asyncio
import logging
import socket

from aiohttp import web

from penstock.core.errors import ConfigError
from penstock.core.listening import Listener
from penstock.core.log import get_logger
from penstock.frontend.batches.runner import BatchRunner
from penstock.frontend.config import FrontendConfig
from penstock.frontend.frontend import Frontend
from penstock.frontend.http.connection import Connection
from penstock.frontend.http.http import HttpSurface
from penstock.frontend.limits.certificate import ServerTls
from penstock.frontend.watch.overview import Supervisor

_CLOSE_TIMEOUT_S = 1.0  # for connections whose requests were cancelled

_log = get_logger()
_quiet = logging.getLogger("penstock.frontend.http.http")
_quiet.setLevel(
    logging.CRITICAL
)  # bytes that are not HTTP are the client's fault: aiohttp's line about them is not logged


class FrontendServer:
    """Serves one `Frontend` over HTTP until `close`."""

    def __init__(
        self, frontend: Frontend, *, share_port: bool = False, supervisor: Supervisor | None = None
    ) -> None:
        """Create the server; `start` opens the port. Raises ConfigError where a file of its settings is wrong.

        Args:
            frontend: what to serve.
            share_port: other frontend processes may listen on the same port; the supervisor reserves it.
            supervisor: tells the page of the whole deployment; None: it shows what this process knows.
        """
        self._frontend = frontend
        self._share_port = share_port
        self._surface = HttpSurface(frontend, supervisor)
        self._tls = None if frontend.config.tls is None else ServerTls(frontend.config.tls)
        self._batches = BatchRunner(frontend)
        self._runner: web.AppRunner | None = None
        self._listening: Listener | None = None

    async def start(self) -> tuple[str, int]:
        """Listen.

        Returns:
            The address and the port; the system chooses the port if 0 is configured.

        Raises:
            ConfigError: the port is taken, or the address is not this machine's.
        """
        config = self._frontend.config
        listener = _listen(config, share_port=self._share_port)
        self._runner = web.AppRunner(
            self._surface.app(),
            handler_cancellation=True,
            shutdown_timeout=_CLOSE_TIMEOUT_S,
        )
        await self._runner.setup()
        self._listening = Listener(
            [listener],
            self.connection,
            on_failure=self._frontend.metrics.accept_failed,
            tls=None if self._tls is None else self._tls.context,
            handshake_timeout_s=config.receive.timeout_s,
            on_refused=self._frontend.refused_handshakes.note,
        )
        host, port = listener.getsockname()[:2]
        _log.info("frontend_listening", host=host, port=port)
        return host, port

    def connection(self) -> Connection:
        """Make the protocol of one accepted connection, once started."""
        assert self._runner is not None, "it has started"
        server, config = self._runner.server, self._frontend.config
        assert server is not None  # set by runner.setup()
        return Connection(
            server,
            refuse=self._surface.refuse,
            raw=self._surface.refuse_raw,
            budget=self._frontend.budget,
            receive=config.receive,
            loop=asyncio.get_running_loop(),
            logger=_quiet,
            keepalive_timeout_s=config.keepalive_timeout_s,
            reader_timeout_s=config.reader_timeout_s,
        )

    async def watch(self) -> None:
        """Read the key file and the certificate again whenever they change, and run batches, for ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._batches.run())
            group.create_task(self._frontend.access.tenants.watch())
            if self._tls is not None:
                group.create_task(self._tls.watch())

    async def close(self) -> None:
        """Stop listening, let requests in flight finish for `drain_timeout_s`, then end the rest with an error. Safe twice."""
        runner, self._runner = self._runner, None
        if runner is None:
            return
        self._surface.draining = True
        if self._listening is not None:
            self._listening.close()
            await self._listening.wait_closed()
        await asyncio.sleep(0)  # accepted connections start their requests first
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        ended = await self._frontend.admission.drain(self._frontend.config.drain_timeout_s)
        if ended:
            _log.warning("requests_cancelled", requests=ended, after_s=round(loop.time() - began_s, 1))
        await runner.cleanup()
        await self._frontend.close()
        self._surface.close()
        _log.info("frontend_closed", requests_ended=ended)

    def hurry(self) -> None:
        """Make a running `close` stop waiting: unfinished requests end with an error now."""
        self._frontend.admission.hurry()


def _listen(config: FrontendConfig, *, share_port: bool) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise _unusable(config, error) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if share_port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # Accepted connections inherit it. The kernel's default grows to megabytes for a stalled client.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, config.write_buffer_bytes)
        listener.bind(address)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise _unusable(config, error) from error
    return listener


def _unusable(config: FrontendConfig, error: OSError) -> ConfigError:
    return ConfigError(
        f"frontend: cannot listen on {config.host} port {config.port}: {error.strerror or error}; "
        "stop what listens there, or choose another with --port"
    )
