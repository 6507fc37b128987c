"""Harnesses of the plane suites: a plane, and workers on the test's loop or in separate processes."""

import asyncio
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Protocol, Self

from penstock.core.types.instances import Instance
from penstock.runtime.config import EventConfig, PlaneConfig
from penstock.runtime.handshake import Identity
from penstock.runtime.requests.memory import MemoryPlane, MemoryServer
from penstock.runtime.requests.tcp import TcpPlane
from penstock.runtime.tls import PlaneTls, PlaneTlsConfig
from penstock.seams import RequestPlane
from penstock.testing.planes.peer import Carrier, CarrierFactory, Peer, worker_peer
from penstock.testing.planes.scripted_worker import (
    ScriptedWorker,
    scripted_instance,
)

SECRET = b"of the suite"


class PlaneHarness(Protocol):
    """What a suite needs of a plane. Leaving the context ends everything it started."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def plane(self) -> RequestPlane:
        """Return a frontend's plane."""
        ...

    async def start_worker(self) -> Instance:
        """Serve a `ScriptedWorker`, in another process if the plane crosses processes."""
        ...

    async def kill(self, instance: Instance) -> None:
        """Kill a worker, without a goodbye."""
        ...


class MemoryPlaneHarness:
    """Workers on the test's own event loop."""

    def __init__(self, config: PlaneConfig | None = None, events: EventConfig | None = None) -> None:
        self._plane = MemoryPlane(config)
        self._events = events
        self._stack = AsyncExitStack()
        self._tasks = asyncio.TaskGroup()
        self._goodbyes: list[asyncio.Event] = []

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self._tasks)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for goodbye in self._goodbyes:
            goodbye.set()
        await self._stack.aclose()

    def plane(self) -> MemoryPlane:
        return self._plane

    async def start_worker(self) -> Instance:
        worker = ScriptedWorker(self._events)
        server = await self._plane.serve(worker)
        goodbye = asyncio.Event()
        worker.say_goodbye = goodbye.set
        self._goodbyes.append(goodbye)
        self._tasks.create_task(_close_after(goodbye, server))
        return scripted_instance(server.address)

    async def kill(self, instance: Instance) -> None:
        self._plane.kill(instance.address)


class TcpPlaneHarness:
    """Each worker in a separate process, on sockets."""

    def __init__(
        self,
        config: PlaneConfig | None = None,
        events: EventConfig | None = None,
        *,
        listen: str = "tcp://127.0.0.1:0",
        loop: str = "uvloop",
        tls: PlaneTlsConfig | None = None,
        carrier: CarrierFactory | None = None,
    ) -> None:
        """Make a harness.

        Args:
            config: of the plane.
            events: of the workers' publishers.
            listen: where the workers listen.
            loop: their event loop, `uvloop` or `asyncio`.
            tls: certificates for both sides.
            carrier: makes what carries events, in this process and in each worker's; None: the connections do.
        """
        self._config = config or PlaneConfig()
        self._events = events or EventConfig()
        self._listen = listen
        self._loop = loop
        self._tls = tls
        self._make_carrier = carrier
        self._carrier: Carrier | None = None
        self._stack = AsyncExitStack()
        self._peers: dict[str, Peer] = {}

    async def __aenter__(self) -> Self:
        if self._make_carrier is not None:
            self._carrier = self._make_carrier(Identity(secret=SECRET))
            await self._stack.enter_async_context(self._carrier)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for peer in self._peers.values():
            await peer.close()
        await self._stack.aclose()

    def plane(self) -> TcpPlane:
        identity = Identity(process="suite", secret=SECRET)
        return TcpPlane(identity, tls=PlaneTls.of(self._tls), config=self._config, carrier=self._carrier)

    async def start_worker(self) -> Instance:
        worker_id = scripted_instance("").worker_id
        identity = Identity(process="peer", worker_id=worker_id, secret=SECRET)
        peer = await Peer.start(
            worker_peer,
            identity,
            (self._listen, self._tls, self._make_carrier),
            self._config,
            self._events,
            loop=self._loop,
        )
        self._peers[peer.value] = peer
        return scripted_instance(peer.value, worker_id=worker_id, pid=peer.pid)

    async def kill(self, instance: Instance) -> None:
        await self._peers[instance.address].kill()


async def _close_after(goodbye: asyncio.Event, server: MemoryServer) -> None:
    await goodbye.wait()
    await server.close()
