"""Hosts with workers and frontends join and leave under streams: none is lost but those of a dead frontend, and nothing is left of them."""

import asyncio
from collections import Counter
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from benchmarks.chaos.hosts import Hosts, Supervisor
from benchmarks.chaos.load import Frontend, Load
from penstock.deploy.state import ADMIN_TOKEN_VARIABLE
from tests.support.host import ADMIN_TOKEN
from tests.support.registries import Etcd, Nats

pytestmark = [
    pytest.mark.slow,
    pytest.mark.alone,
    pytest.mark.needs("ip", "namespaces", "etcd", "nats-server"),
]
HOSTS, CLIENTS = 4, 8
SETTLE_S = 60.0
PAUSE_S = 1.0
STAYS, LEAVES, DIES, IS_CUT_OFF = range(HOSTS)
"""What each host does; the one that is cut off has no frontend, whose clients would wait for it."""
MORE_FILES_MAX = 12


class Cluster:
    """Hosts of one deployment that come and go. One event loop owns it."""

    def __init__(self, hosts: Hosts, runtime: dict[str, Any], session: aiohttp.ClientSession) -> None:
        """Start nothing yet."""
        self.frontends: list[Frontend] = []
        self.joined: Counter[int] = Counter()
        self._hosts = hosts
        self._session = session
        self._numbers = count()
        self._supervisors: dict[int, Supervisor] = {}
        self._names: dict[int, str] = {}
        self._graph = {
            "model": "demo",
            "name": "churn",
            "supervision": {"spare_processes": 0},
            "request_plane": {"heartbeat_interval_s": 0.5, "heartbeat_timeout_s": 2.0},
            "frontend": {"host": "0.0.0.0", "port": 8000},
            "roles": {"aggregated": {"engine": "mock", "mock": {"speedup": 2}}},
            "runtime": runtime,
        }

    @property
    def names(self) -> set[str]:
        """Workers of the hosts that are there."""
        return {f"worker-1@{name}" for name in self._names.values()}

    async def join(self, host: int) -> None:
        """Start a host, and wait until it is ready; its frontend then gets streams, too."""
        self._names[host] = name = f"host-{host}-{next(self._numbers)}"
        run = "aggregated" if host == IS_CUT_OFF else "aggregated,frontend"
        prefix = ("ip", "netns", "exec", self._hosts.names[host])
        folder = self._hosts.folder / name
        supervisor = Supervisor(self._graph, folder, "--run", run, prefix=prefix)
        self._supervisors[host] = supervisor
        await asyncio.to_thread(supervisor.wait_ready)
        self.joined[host] += 1
        if host != IS_CUT_OFF:
            self.frontends.append(Frontend(self.url(host)))

    async def leave(self, host: int) -> None:
        """End a host as its number says."""
        url, loop = self.url(host), asyncio.get_running_loop()
        if host == DIES:
            for frontend in self.frontends:
                if frontend.url == url:
                    frontend.troubles.append([loop.time(), float("inf")])
        elif host == IS_CUT_OFF:
            self._hosts.cut(host)
        self.frontends[:] = [frontend for frontend in self.frontends if frontend.url != url]
        supervisor = self._supervisors.pop(host)
        del self._names[host]
        if host in {DIES, IS_CUT_OFF}:
            supervisor.kill()
            self._hosts.heal(host)
        await asyncio.to_thread(supervisor.close)

    async def end(self) -> None:
        for host in sorted(self._supervisors, reverse=True):
            await self.leave(host)

    def url(self, host: int) -> str:
        return f"http://{self._hosts.address_of(host)}:8000"

    async def until_all_see(self, hosts: tuple[int, ...]) -> None:
        """Wait until the frontends of these hosts know those workers that are there, and no other."""
        wanted = dict.fromkeys(self.names, "ready")
        async with asyncio.timeout(SETTLE_S):
            for host in hosts:
                while await self._workers(host) != wanted:  # noqa: ASYNC110 - the state is in other processes
                    await asyncio.sleep(0.2)

    async def _workers(self, host: int) -> dict[str, str]:
        headers = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
        async with self._session.get(f"{self.url(host)}/admin/workers", headers=headers) as answer:
            return {each["name"]: each["condition"] for each in (await answer.json())["workers"]}

    def open_files(self) -> dict[str, int]:
        """Count the open files of each process of the host that stays."""
        pids = self._supervisors[STAYS].pids() | {"supervisor": self._supervisors[STAYS].pid}
        return {name: len(list(Path(f"/proc/{pid}/fd").iterdir())) for name, pid in pids.items()}


@pytest.mark.parametrize(
    ("discovery", "make", "rounds"),
    [
        ("etcd", Etcd, 2),
        pytest.param("etcd", Etcd, 8, marks=pytest.mark.nightly),
        pytest.param("nats", Nats, 8, marks=pytest.mark.nightly),
    ],
)
@pytest.mark.within(240)
async def test_hosts_join_and_leave_under_streams(monkeypatch, discovery, make, rounds):
    monkeypatch.setenv(ADMIN_TOKEN_VARIABLE, ADMIN_TOKEN)
    counts: Counter[str] = Counter()
    problems: list[str] = []

    async def keep_asking(load: Load, session: aiohttp.ClientSession) -> None:
        while True:
            outcome = await load.put(session, 4 * CLIENTS, CLIENTS)
            counts.update(outcome.counts)
            problems.extend(outcome.problems)

    async def churn(cluster: Cluster) -> None:
        for host in (LEAVES, DIES, IS_CUT_OFF):
            await cluster.leave(host)
            await asyncio.sleep(PAUSE_S)
            await cluster.join(host)

    async def scenario(hosts: Hosts, runtime: dict[str, Any]) -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            cluster = Cluster(hosts, runtime, session)
            try:
                for host in range(HOSTS):
                    await cluster.join(host)
                await cluster.until_all_see((STAYS, LEAVES, DIES))
                load = Load(cluster.frontends, output_tokens=64, prompts=8, seed=1)
                await load.learn(session)
                asking = asyncio.create_task(keep_asking(load, session))
                await churn(cluster)
                before = cluster.open_files()
                for _ in range(rounds - 1):
                    await churn(cluster)
                await cluster.until_all_see((STAYS, LEAVES, DIES))
                asking.cancel()
                await asyncio.wait((asking,))
                assert asking.cancelled()
                after = cluster.open_files()
            finally:
                await cluster.end()
        assert min(cluster.joined[host] for host in (LEAVES, DIES, IS_CUT_OFF)) == 1 + rounds
        assert set(counts) <= {"completed", "excused"}, (counts, problems)
        assert counts["completed"] > 10 * counts["excused"]
        assert after.keys() == before.keys(), "nobody was started again"
        for name, files in after.items():
            assert files <= before[name] + MORE_FILES_MAX, name

    with Hosts(HOSTS) as hosts:
        async with make(host=hosts.address) as server:
            runtime = {
                "discovery": discovery,
                "urls": [server.url],
                "registry": {"lease_ttl_s": 2.0},
                **({"events": "nats"} if discovery == "nats" else {}),
            }
            await scenario(hosts, runtime)
