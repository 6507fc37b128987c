"""Faults, one after the other: processes killed and stopped, hosts cut off, registries killed, stopped and emptied."""

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from itertools import cycle

import aiohttp

from benchmarks.chaos.hosts import Hosts, Supervisor
from benchmarks.chaos.load import Frontend
from tests.support.registries import RegistryServer

_LASTS_S = 4.0
"""How long what is stopped or cut stays so: longer than a connection may be silent."""


class Faults:
    """What is done to a deployment. One event loop owns it."""

    def __init__(
        self,
        hosts: Hosts,
        supervisors: Sequence[Supervisor],
        frontends: Sequence[Frontend],
        registries: dict[str, RegistryServer],
        *,
        seed: int,
    ) -> None:
        """Do nothing yet.

        Args:
            hosts: the first of them have the frontends, and are not cut off from their clients.
            supervisors: of the hosts.
            frontends: of the first hosts.
            registries: by name.
            seed: of what is chosen.
        """
        self.counts: Counter[str] = Counter()
        self._hosts = hosts
        self._supervisors = supervisors
        self._frontends = frontends
        self._registries = registries
        self._rng = random.Random(seed)

    async def keep_doing(self, every_s: float) -> None:
        """Have a fault begin every so often, until cancelled; what was done is undone."""
        kinds: list[tuple[str, Callable[[], Awaitable[None]]]] = [
            ("worker_killed", self._kill_worker),
            ("host_cut", self._cut_host),
            ("etcd_killed", lambda: self._kill_registry("etcd")),
            ("worker_stopped", self._stop_worker),
            ("nats_killed", lambda: self._kill_registry("nats")),
            ("host_silenced", self._silence_host),
            ("frontend_killed", self._kill_frontend),
            ("nats_stopped", lambda: self._stop_registry("nats")),
            ("etcd_stopped", lambda: self._stop_registry("etcd")),
            ("etcd_emptied", lambda: self._kill_registry("etcd", empty=True)),
        ]
        loop = asyncio.get_running_loop()
        for name, fault in cycle(kinds):
            due_s = loop.time() + every_s
            self.counts[name] += 1
            await fault()
            await asyncio.sleep(max(0.0, due_s - loop.time()))

    def _worker(self) -> int:
        """Choose a worker that lives."""
        found = [
            pid
            for supervisor in self._supervisors
            for name, pid in supervisor.pids().items()
            if name.startswith("worker-")
        ]
        return self._rng.choice(found)

    async def _kill_worker(self) -> None:
        os.kill(self._worker(), signal.SIGKILL)

    async def _stop_worker(self) -> None:
        pid = self._worker()
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(_LASTS_S)
        finally:
            with suppress(ProcessLookupError):  # its supervisor may have replaced it
                os.kill(pid, signal.SIGCONT)

    async def _cut_host(self) -> None:
        await self._bad_host(self._hosts.cut)

    async def _silence_host(self) -> None:
        await self._bad_host(self._hosts.silence)

    async def _bad_host(self, fault: Callable[[int], None]) -> None:
        host = self._rng.randrange(len(self._frontends), len(self._supervisors))
        fault(host)
        try:
            await asyncio.sleep(_LASTS_S)
        finally:
            self._hosts.heal(host)

    async def _kill_registry(self, name: str, *, empty: bool = False) -> None:
        server = self._registries[name]
        server.kill()
        try:
            await asyncio.sleep(_LASTS_S)
        finally:
            if empty:
                server.forget()
            await asyncio.to_thread(server.start)

    async def _stop_registry(self, name: str) -> None:
        self._registries[name].pause()
        try:
            await asyncio.sleep(_LASTS_S)
        finally:
            self._registries[name].resume()

    async def _kill_frontend(self) -> None:
        at = self._rng.randrange(len(self._frontends))
        frontend = self._frontends[at]
        frontend.troubles.append([time.monotonic(), float("inf")])
        pid = next(pid for name, pid in self._supervisors[at].pids().items() if name.startswith("frontend-"))
        os.kill(pid, signal.SIGKILL)
        async with aiohttp.ClientSession() as session:
            while True:
                await asyncio.sleep(0.2)
                with suppress(aiohttp.ClientError, OSError, TimeoutError):
                    timeout = aiohttp.ClientTimeout(total=2.0)
                    async with session.get(f"{frontend.url}/health", timeout=timeout) as response:
                        if response.ok:
                            break
        frontend.troubles[-1][1] = time.monotonic()
