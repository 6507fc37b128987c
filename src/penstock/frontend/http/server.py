"""A frontend process's listening end: it opens the port, and closes it without losing an answer."""

import asyncio
import logging
import socket

from aiohttp import web

from penstock.core.errors import ConfigError
from penstock.core.log import get_logger
from penstock.core.net.listening import Listener
from penstock.frontend.config import FrontendConfig
from penstock.frontend.frontend import Frontend
from penstock.frontend.http.connection import Connection
from penstock.frontend.http.http import HttpSurface

_CLOSE_TIMEOUT_S = 1.0  # for connections of requests that were ended; they have nothing left to wait for

_log = get_logger()


class FrontendServer:
    """Serves one `Frontend` over HTTP until `close`."""

    def __init__(self, frontend: Frontend, *, share_port: bool = False) -> None:
        """Prepare.

        Args:
            frontend: what to serve.
            share_port: other frontend processes may have the same port; who starts them holds it against strangers.
        """
        self._frontend = frontend
        self._share_port = share_port
        self._surface = HttpSurface(frontend)
        self._runner: web.AppRunner | None = None
        self._listening: Listener | None = None

    async def start(self) -> tuple[str, int]:
        """Listen.

        Returns:
            The address and the port, which the system chose if the configured one is 0.

        Raises:
            ConfigError: the port is taken, or the address is not this machine's.
        """
        config = self._frontend.config
        listener = _listen(config, share_port=self._share_port)
        # What aiohttp itself refuses, as garbage instead of HTTP, is the client's fault and no event here.
        quiet = logging.getLogger("penstock.frontend.http.http")
        quiet.setLevel(logging.CRITICAL)
        self._runner = web.AppRunner(
            self._surface.app(),
            handler_cancellation=True,
            shutdown_timeout=_CLOSE_TIMEOUT_S,
        )
        await self._runner.setup()
        server = self._runner.server
        assert server is not None  # it is set up
        loop = asyncio.get_running_loop()
        self._listening = Listener(
            [listener],
            lambda: Connection(
                server,
                refuse=self._surface.refuse,
                raw=self._surface.refuse_raw,
                room=self._frontend.room,
                receive=config.receive,
                loop=loop,
                logger=quiet,
                keepalive_timeout_s=config.keepalive_timeout_s,
            ),
            on_failure=self._frontend.metrics.accept_failed,
        )
        host, port = listener.getsockname()[:2]
        _log.info("frontend_listening", host=host, port=port)
        return host, port

    async def close(self) -> None:
        """Stop listening, let requests under way finish for a while, then end the rest with an error. Safe twice."""
        runner, self._runner = self._runner, None
        if runner is None:
            return
        self._surface.draining = True
        if self._listening is not None:
            self._listening.close()
            await self._listening.wait_closed()
        await asyncio.sleep(0)  # connections accepted already get to start their requests
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        ended = await self._frontend.admission.drain(self._frontend.config.drain_timeout_s)
        if ended:
            _log.warning("requests_given_up", requests=ended, after_s=round(loop.time() - began_s, 1))
        await runner.cleanup()
        await self._frontend.close()
        _log.info("frontend_closed", requests_ended=ended)

    def hurry(self) -> None:
        """Let a `close` under way wait no longer: what is not finished ends with an error now."""
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
        # Accepted connections inherit it. Left to grow by itself, it takes megabytes for a client that stalls.
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
