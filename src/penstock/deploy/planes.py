"""The planes of a process, chosen by the graph's `runtime`: the one place that names implementations."""

import asyncio
import random
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Protocol, Self

from prometheus_client import CollectorRegistry

from penstock.core.errors import ConfigError
from penstock.deploy.messages import ProcessSettings
from penstock.graph import Graph
from penstock.graph.runtime import RuntimeSpec
from penstock.runtime.credentials import EVENTS_VARIABLE, REGISTRY_VARIABLE, Credentials
from penstock.runtime.discovery.local import LocalDiscovery
from penstock.runtime.discovery.registrations import RegistryMetrics
from penstock.runtime.handshake import Identity
from penstock.runtime.kubernetes import KubernetesAccess, KubernetesClient
from penstock.runtime.requests.tcp import TcpPlane
from penstock.runtime.tls import PlaneTls
from penstock.seams import Discovery, EventCarrier


class RegistryClient(Discovery, Protocol):
    """A discovery that works while its context is entered."""

    async def connect(self) -> None:
        """Check that the registry answers, and takes this process.

        Raises:
            Unavailable: not in time; the text says why.
            ConfigError: other deployments are registered there.
        """
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Planes:
    """Discovery, request plane and carrier of events of one process; they work while its context is entered."""

    def __init__(
        self,
        graph: Graph,
        common: ProcessSettings,
        identity: Identity,
        *,
        rng: random.Random,
        registry: CollectorRegistry | None = None,
    ) -> None:
        """Choose them.

        Args:
            graph: its `runtime` says which, its `request_plane` their bounds.
            common: what the supervisor says to all its processes.
            identity: of this process.
            rng: for jitter.
            registry: where metrics of discovery go; None for nowhere.

        Raises:
            ConfigError: a certificate or an account cannot be read.
        """
        self._tls = PlaneTls.of(graph.runtime.tls)
        self.discovery = _discovery(
            graph, common, identity, tls=self._tls, rng=rng, metrics=RegistryMetrics(registry)
        )
        self.carrier = _carrier(graph, identity, rng=rng, registry=registry)
        self.requests = TcpPlane(
            identity,
            listen=common.listen or f"unix://{common.runtime_dir}/{identity.process}.sock",
            advertise_host=common.advertise or None,
            tls=self._tls,
            config=graph.request_plane,
            carrier=self.carrier,
        )
        self._stack = AsyncExitStack()

    async def connect(self) -> None:
        """Check that the registry and what carries events answer, and take this process.

        Raises:
            Unavailable: not in time; the text says why.
            ConfigError: other deployments are registered there.
        """
        await self.discovery.connect()
        if self.carrier is not None:
            await self.carrier.connect()

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self.discovery)
        if self.carrier is not None:
            await self._stack.enter_async_context(self.carrier)
        if self._tls is not None:
            group = await self._stack.enter_async_context(asyncio.TaskGroup())
            self._stack.callback(group.create_task(self._tls.watch(), name="certificates").cancel)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()


class EventsClient(EventCarrier, Protocol):
    """A carrier that works while its context is entered."""

    async def connect(self) -> None:
        """Check that what carries events answers.

        Raises:
            Unavailable: not in time; the text says why.
        """
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def _carrier(
    graph: Graph, identity: Identity, *, rng: random.Random, registry: CollectorRegistry | None
) -> EventsClient | None:
    """Make what carries events; None where connections do."""
    spec = graph.runtime
    if spec.events == "direct":
        return None
    try:
        from penstock.runtime.events.nats import (  # noqa: PLC0415 - an extra
            BroadcastMetrics,
            NatsCarrier,
        )
    except ImportError as error:
        raise ConfigError(
            "runtime.events: nats needs the package nats-py: pip install 'penstock-llm[nats]'"
        ) from error
    return NatsCarrier(
        spec.nats_urls,
        identity,
        namespace=spec.namespace or graph.name,
        rng=rng,
        tls=spec.tls,
        credentials=_event_credentials(spec) if spec.event_urls else _registry_credentials(spec),
        config=spec.broadcast,
        connection=spec.registry,
        metrics=BroadcastMetrics(registry),
    )


def _discovery(
    graph: Graph,
    common: ProcessSettings,
    identity: Identity,
    *,
    tls: PlaneTls | None,
    rng: random.Random,
    metrics: RegistryMetrics,
) -> RegistryClient:
    spec, namespace = graph.runtime, graph.runtime.namespace or graph.name
    match spec.discovery:
        case "local":
            return LocalDiscovery(
                common.hub_address, identity, rng=rng, tls=tls, config=spec.registry, metrics=metrics
            )
        case "etcd":
            from penstock.runtime.discovery.etcd import EtcdDiscovery  # noqa: PLC0415 - an HTTP client

            return EtcdDiscovery(
                spec.urls,
                identity,
                namespace=namespace,
                rng=rng,
                tls=spec.tls,
                credentials=_registry_credentials(spec),
                config=spec.registry,
                metrics=metrics,
            )
        case "nats":
            try:
                from penstock.runtime.discovery.nats import NatsDiscovery  # noqa: PLC0415 - an extra
            except ImportError as error:
                raise ConfigError(
                    "runtime.discovery: nats needs the package nats-py: pip install 'penstock-llm[nats]'"
                ) from error

            return NatsDiscovery(
                spec.urls,
                identity,
                namespace=namespace,
                rng=rng,
                tls=spec.tls,
                credentials=_registry_credentials(spec),
                config=spec.registry,
                metrics=metrics,
            )
        case "kubernetes":
            from penstock.runtime.discovery.kubernetes import (  # noqa: PLC0415 - an HTTP client
                KubernetesDiscovery,
            )

            return KubernetesDiscovery(
                KubernetesClient(KubernetesAccess.find(), timeout_s=spec.registry.connect_timeout_s),
                identity,
                namespace=namespace,
                rng=rng,
                config=spec.registry,
                metrics=metrics,
            )


def _registry_credentials(spec: RuntimeSpec) -> Credentials:
    field = "runtime.registry_credentials_file"
    return Credentials(spec.registry_credentials_file, field=field, variable=REGISTRY_VARIABLE)


def _event_credentials(spec: RuntimeSpec) -> Credentials:
    field = "runtime.event_credentials_file"
    return Credentials(spec.event_credentials_file, field=field, variable=EVENTS_VARIABLE)
