"""What the operator says of itself by HTTP: /healthz, /readyz, and /metrics with its metrics."""

from collections.abc import Callable
from types import TracebackType
from typing import Self

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from penstock.core.errors import ConfigError
from penstock.core.listening import Address


class OperatorHttp:
    """Listens for as long as its context. One event loop owns it.

    `/healthz` is 200 while the event loop turns, `/readyz` while the API server answers, else 503: an operator that waits for the lead is
    ready, too.
    """

    def __init__(self, address: str, registry: CollectorRegistry, is_ready: Callable[[], bool]) -> None:
        """Make a server of `registry`'s metrics.

        Raises:
            ConfigError: `address` is not `tcp://HOST:PORT`.
        """
        self._address = Address.parse(address, source="--listen")
        self._registry = registry
        self._is_ready = is_ready
        app = web.Application()
        app.router.add_get("/healthz", self._health)
        app.router.add_get("/readyz", self._readiness)
        app.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=1.0)
        self.port = 0
        """Where it listens, once entered."""

    async def __aenter__(self) -> Self:
        """Listen.

        Raises:
            ConfigError: the address is taken, or none of this host.
        """
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self._address.host, self._address.port).start()
        except OSError as error:
            await self._runner.cleanup()
            raise ConfigError(
                f"--listen: cannot listen at {self._address}: {error.strerror or error}; choose another port"
            ) from error
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readiness(self, _: web.Request) -> web.Response:
        if self._is_ready():
            return web.Response(text="ok\n")
        return web.Response(
            status=503,
            text="the API server does not answer, or does not show all kinds of objects: the log says which\n",
        )

    async def _metrics(self, _: web.Request) -> web.Response:
        text = generate_latest(self._registry)
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})


_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class OperatorMetrics:
    """Metrics of one operator. One event loop owns them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.reconciles = Counter(
            "penstock_operator_reconciles",
            "Times that the operator worked on a graph, by outcome: done; failed, as the API server did not answer or refused;"
            " crashed, by a mistake of the operator.",
            ["outcome"],
            registry=registry,
        )
        self.seconds = Histogram(
            "penstock_operator_reconcile_seconds", "Time of each.", buckets=_SECONDS, registry=registry
        )
        self.queued = Gauge(
            "penstock_operator_queued_graphs", "Graphs that wait to be worked on.", registry=registry
        )
        self.graphs = Gauge(
            "penstock_operator_graphs",
            "PenstockGraphs of the namespace, 0 while another operator acts.",
            registry=registry,
        )
        self.leads = Gauge(
            "penstock_operator_leader", "1 while this operator acts, 0 while another does.", registry=registry
        )
