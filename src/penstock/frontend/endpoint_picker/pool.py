"""The servers of an InferencePool of Kubernetes: its pods, as they become ready and go."""

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from penstock.core.errors import PenstockError, RequestError, Unavailable
from penstock.core.log import get_logger
from penstock.core.types.instances import InstanceState
from penstock.router.gateway import GatewayServer
from penstock.router.routing_service import RoutingService
from penstock.runtime.kubernetes import KubernetesClient, Object, Pace, Reflector, Resource

POOLS = Resource("inference.networking.k8s.io", "v1", "inferencepools", "InferencePool")
PODS = Resource("", "v1", "pods", "Pod")
PACE = Pace(probe_s=10.0, retry_s=0.5, retry_s_max=10.0)
_log = get_logger()


class PoolServers:
    """Names the ready pods of an InferencePool to a routing service. One event loop owns it.

    A pod that is terminating or not ready gets no more requests; those on their way stay open. While the API server is away, what was
    known last goes on.
    """

    def __init__(
        self,
        service: RoutingService,
        client: KubernetesClient,
        *,
        pool: str,
        model: str,
        adapters: tuple[str, ...],
        rng: random.Random,
        pace: Pace = PACE,
    ) -> None:
        """Know no pod yet; `run` follows them.

        Args:
            service: gets the servers.
            client: of the cluster, in the pool's namespace.
            pool: name of the InferencePool.
            model: that the pods serve.
            adapters: LoRA adapters that they serve.
            rng: for jitter of retries.
            pace: of retries.
        """
        self._service = service
        self._client = client
        self._pool = pool
        self._model = model
        self._adapters = adapters
        self._rng = rng
        self._pace = pace
        self._selector: str | None = None
        self._ports: tuple[int, ...] = ()
        self._pods: dict[str, Object] = {}
        self._changed = asyncio.Event()
        self._selected = asyncio.Event()

    async def run(self) -> None:
        """Follow the pool and its pods until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow(POOLS, "", _Followed(self._take_pools, self._pool)))
            group.create_task(self._follow_pods())
            group.create_task(self._apply())

    async def _follow(self, resource: Resource, labels: str, follower: "_Followed") -> None:
        await Reflector(self._client, resource, labels, follower, pace=self._pace, rng=self._rng).run()

    async def _follow_pods(self) -> None:
        """Follow the pods that the pool selects, anew whenever it selects others."""
        while True:
            await self._selected.wait()
            self._selected.clear()
            if self._selector is None:
                self._take_pods({})
                continue
            async with asyncio.TaskGroup() as group:
                following = group.create_task(self._follow(PODS, self._selector, _Followed(self._take_pods)))
                await self._selected.wait()
                following.cancel()

    def _take_pools(self, pools: dict[str, Object]) -> None:
        spec = pools.get(self._pool, {}).get("spec")
        if spec is None:
            _log.warning(
                "inference_pool_missing",
                pool=self._pool,
                namespace=self._client.namespace,
                effect="it has no servers",
            )
            selector, ports = None, ()
        else:
            labels = (spec.get("selector") or {}).get("matchLabels") or {}
            selector = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
            ports = tuple(port["number"] for port in spec.get("targetPorts") or ())
        self._ports = ports
        if selector != self._selector or selector is None:
            self._selector = selector
            self._selected.set()
        self._changed.set()

    def _take_pods(self, pods: dict[str, Object]) -> None:
        self._pods = pods
        self._changed.set()

    async def _apply(self) -> None:
        """Name the pods' servers to the routing service whenever the pods change."""
        known: dict[str, GatewayServer] = {}
        while True:
            await self._changed.wait()
            self._changed.clear()
            wanted = self._servers()
            for name in [name for name in known if name not in wanted]:
                del known[name]
                with suppress(RequestError):
                    await self._service.remove(name)
            for name, server in wanted.items():
                if known.get(name) == server:
                    continue
                try:
                    await self._service.put(name, server)
                except PenstockError as error:
                    _log.warning("pod_refused", pod=name, error=error.message, effect="it gets no requests")
                    continue
                known[name] = server

    def _servers(self) -> dict[str, GatewayServer]:
        servers = {}
        for name, pod in self._pods.items():
            ip = pod.get("status", {}).get("podIP")
            if not ip or not _has_been_ready(pod):
                continue
            host = f"[{ip}]" if ":" in ip else ip
            state = InstanceState.READY if _is_ready(pod) else InstanceState.DRAINING
            for port in self._ports:
                servers[name if len(self._ports) == 1 else f"{name}:{port}"] = GatewayServer(
                    url=f"http://{host}:{port}",
                    model=self._model,
                    adapters=self._adapters,
                    state=state,
                    host=pod["spec"].get("nodeName") or "",
                )
        return servers


class _Followed:
    """Keeps the objects that a reflector sees, and passes all of them on after each change."""

    def __init__(self, changed: Callable[[dict[str, Object]], None], only: str | None = None) -> None:
        self._objects: dict[str, Object] = {}
        self._changed = changed
        self._only = only

    def listed(self, objects: list[Object]) -> None:
        self._objects = {body["metadata"]["name"]: body for body in objects}
        self._tell(self._only)

    def put(self, body: Object) -> None:
        self._objects[body["metadata"]["name"]] = body
        self._tell(body["metadata"]["name"])

    def deleted(self, body: Object) -> None:
        self._objects.pop(body["metadata"]["name"], None)
        self._tell(body["metadata"]["name"])

    def _tell(self, name: str | None) -> None:
        if self._only is None or name == self._only:
            self._changed(dict(self._objects))

    def connected(self) -> None:
        """Nothing is to be done: the list tells."""

    def lost(self, error: Unavailable) -> None:
        _log.warning("kubernetes_unavailable", error=error.message, effect="the pods known last serve on")


def _condition(pod: Object) -> Any:
    conditions = pod.get("status", {}).get("conditions") or ()
    return next((one["status"] for one in conditions if one["type"] == "Ready"), None)


def _is_ready(pod: Object) -> bool:
    return _condition(pod) == "True" and not pod["metadata"].get("deletionTimestamp")


def _has_been_ready(pod: Object) -> bool:
    """Whether it has an answer to give: it is ready, or terminates with requests on their way."""
    return _condition(pod) == "True" or bool(pod["metadata"].get("deletionTimestamp"))
