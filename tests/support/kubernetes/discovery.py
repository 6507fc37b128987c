"""A harness of discovery by the tests' API server; each member is a separate process."""

import random
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from types import TracebackType
from typing import Self

from penstock.core.ids import WorkerId
from penstock.core.types.instances import Instance
from penstock.deploy.manifests.kubernetes.access import DISCOVERY_RULES
from penstock.runtime.config import DiscoveryConfig
from penstock.runtime.discovery.kubernetes.discovery import KubernetesDiscovery
from penstock.runtime.discovery.metrics import RegistryMetrics
from penstock.runtime.handshake import Identity
from penstock.runtime.kubernetes.access import KubernetesAccess
from penstock.runtime.kubernetes.pod import Pod
from penstock.testing.planes.peer import Peer, member_peer
from tests.support.kubernetes.api_server import ApiServer

IDENTITY = Identity(process="suite", secret=b"of the suite")
TTL_S = 1.0
CONFIG = DiscoveryConfig(lease_ttl_s=TTL_S, connect_timeout_s=10.0)
Access = Callable[[], KubernetesAccess]


def discovery_at(
    access: Access,
    identity: Identity = IDENTITY,
    *,
    seed: int = 1,
    namespace: str = "suite",
    config: DiscoveryConfig = CONFIG,
    metrics: RegistryMetrics | None = None,
    pod: Pod | None = None,
) -> KubernetesDiscovery:
    """Make a client, in whichever process this runs."""
    return KubernetesDiscovery(
        access(),
        identity,
        namespace=namespace,
        rng=random.Random(seed),
        config=config,
        metrics=metrics,
        pod=pod,
    )


class ClusterHarness:
    """Clients and members of whatever cluster `access` reaches."""

    def __init__(self) -> None:
        self._members: dict[WorkerId, Peer] = {}
        self._stack = AsyncExitStack()

    @property
    def access(self) -> Access:
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for member in self._members.values():
            await member.close()
        await self._stack.aclose()

    async def client(
        self,
        identity: Identity = IDENTITY,
        *,
        namespace: str = "suite",
        config: DiscoveryConfig = CONFIG,
        metrics: RegistryMetrics | None = None,
        pod: Pod | None = None,
    ) -> KubernetesDiscovery:
        client = discovery_at(
            self.access, identity, namespace=namespace, config=config, metrics=metrics, pod=pod
        )
        return await self._stack.enter_async_context(client)

    async def start_member(self, instance: Instance) -> None:
        client = partial(discovery_at, self.access, seed=instance.worker_id)
        self._members[instance.worker_id] = await Peer.start(member_peer, client, instance)

    async def kill_member(self, instance: Instance) -> None:
        await self._members[instance.worker_id].kill()


class ApiServerHarness(ClusterHarness):
    """An API server for each test."""

    def __init__(self) -> None:
        super().__init__()
        self.server = ApiServer()

    @property
    def access(self) -> Access:
        (token, *_) = self.server.tokens
        return partial(KubernetesAccess, self.server.url, namespace="default", token=token)

    async def __aenter__(self) -> Self:
        self.server.rules["suite-token"] = DISCOVERY_RULES
        await self._stack.enter_async_context(self.server)
        return self
