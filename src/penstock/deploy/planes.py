"""The planes of a process, chosen by the graph's `runtime`: the one place that names implementations."""

import asyncio
import random
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from penstock.deploy.messages import Common
from penstock.graph.runtime import RuntimeSpec
from penstock.runtime.config import PlaneConfig
from penstock.runtime.discovery.local import LocalDiscovery
from penstock.runtime.handshake import Identity
from penstock.runtime.requests.tcp import TcpPlane
from penstock.runtime.tls import PlaneTls


class Planes:
    """Discovery and request plane of one process; they work while its context is entered."""

    def __init__(
        self,
        spec: RuntimeSpec,
        bounds: PlaneConfig,
        common: Common,
        identity: Identity,
        *,
        rng: random.Random,
    ) -> None:
        """Choose them.

        Args:
            spec: the graph's `runtime`.
            bounds: the graph's `request_plane`.
            common: what the supervisor says to all its processes.
            identity: of this process.
            rng: for jitter.

        Raises:
            ConfigError: a certificate cannot be read.
        """
        self._tls = PlaneTls.of(spec.tls)
        self.discovery = LocalDiscovery(
            common.hub_address, identity, rng=rng, tls=self._tls, config=spec.registry
        )
        self.requests = TcpPlane(
            identity,
            listen=common.listen or f"unix://{common.runtime_dir}/{identity.process}.sock",
            advertise_host=common.advertise or None,
            tls=self._tls,
            config=bounds,
        )
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self.discovery)
        if self._tls is not None:
            group = await self._stack.enter_async_context(asyncio.TaskGroup())
            self._stack.callback(group.create_task(self._tls.watch(), name="certificates").cancel)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()
