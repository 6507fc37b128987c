"""The simulated plane and registry against the same suites as the real ones, on virtual time."""

import asyncio
import random
from contextlib import AsyncExitStack

from penstock.sim.cluster import SimRegistry
from penstock.sim.loop import SimLoop
from penstock.sim.network import NetworkConfig, SimNetwork
from penstock.sim.plane import SimPlane
from penstock.testing.planes.direct import RanksSuite
from penstock.testing.planes.discovery import DiscoverySuite
from penstock.testing.planes.harness import PlaneHarness
from penstock.testing.planes.scripted_worker import ScriptedWorker, scripted_instance

LEASE_S = 1.0


class SimPlaneHarness(PlaneHarness):
    def __init__(self, config=None, events=None):
        self._config = config
        self._events = events
        self._plane = None
        self._stack = AsyncExitStack()
        self._tasks = asyncio.TaskGroup()
        self._goodbyes = []

    async def __aenter__(self):
        self._plane = SimPlane(SimNetwork(random.Random(0), NetworkConfig(latency_s=0.0005)), self._config)
        await self._stack.enter_async_context(self._tasks)
        return self

    async def __aexit__(self, kind, error, trace):
        for goodbye in self._goodbyes:
            goodbye.set()
        await self._stack.aclose()

    def plane(self):
        return self._plane.at("frontend")

    async def start_worker(self):
        worker = ScriptedWorker(self._events)
        server = await self._plane.at(f"worker-{len(self._goodbyes)}").serve(worker)
        goodbye = asyncio.Event()
        worker.say_goodbye = goodbye.set
        self._goodbyes.append(goodbye)

        async def close():
            await goodbye.wait()
            await server.close()

        self._tasks.create_task(close())
        return scripted_instance(server.address)

    async def kill(self, instance):
        self._plane.kill(self._plane.servers[instance.address].host)


class SimDiscoveryHarness:
    def __init__(self):
        self._registry = None
        self._numbers = {}

    async def __aenter__(self):
        config = NetworkConfig(latency_s=0.0005, lease_ttl_s=LEASE_S)
        self._registry = SimRegistry(SimNetwork(random.Random(0), config))
        return self

    async def __aexit__(self, kind, error, trace):
        pass

    async def client(self):
        return self._registry.at("client")

    async def start_member(self, instance):
        self._numbers[instance.worker_id] = host = f"member-{len(self._numbers)}"
        await self._registry.at(host).register(instance)

    async def kill_member(self, instance):
        self._registry.kill(self._numbers[instance.worker_id])


class TestSimPlane(RanksSuite):
    harness = SimPlaneHarness
    loop_factory = SimLoop


class TestSimDiscovery(DiscoverySuite):
    harness = SimDiscoveryHarness
    loop_factory = SimLoop
