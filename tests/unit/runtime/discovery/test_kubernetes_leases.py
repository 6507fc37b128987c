"""What workers write to the API server of Kubernetes, by virtual time, and what a watcher makes of it."""

import asyncio
import itertools
import json
import random
from collections import Counter
from contextlib import AsyncExitStack, suppress

import pytest

from penstock.core.types.instances import InstancePut, InstanceRemoved
from penstock.runtime.config import DiscoveryConfig
from penstock.runtime.discovery.kubernetes import KubernetesDiscovery
from penstock.runtime.handshake import Identity
from penstock.sim.loop import SimLoop
from penstock.testing.loop import run_async
from penstock.testing.planes.scripted_worker import scripted_instance
from tests.support.kubernetes.direct import DirectClient
from tests.support.kubernetes.fields import Manager
from tests.support.kubernetes.problems import Refused
from tests.support.kubernetes.store import Store

IDENTITY = Identity(process="suite", secret=b"of the suite")
CONFIG = DiscoveryConfig()


class Cluster:
    """Workers, each a process of its own, and what one watcher sees of them."""

    def __init__(self, stack, group):
        self.store, self.writes = Store(), Counter()
        self.clients, self.present, self.removed = {}, set(), []
        self._stack, self._group = stack, group

    async def process(self, number):
        client = DirectClient(self.store, self.writes)
        discovery = KubernetesDiscovery(
            client, IDENTITY, namespace="suite", rng=random.Random(number), config=CONFIG
        )
        return client, await self._stack.enter_async_context(discovery)

    async def start(self, num_workers):
        _, watching = await self.process(0)
        self._group.create_task(self._watch(watching))
        for number in range(1, num_workers + 1):
            client, discovery = await self.process(number)
            instance = scripted_instance(f"tcp://10.0.{number // 256}.{number % 256}:1")
            await discovery.register(instance)
            self.clients[instance.worker_id] = client

    async def _watch(self, discovery):
        async for change in discovery.watch():
            match change:
                case InstancePut(instance=instance):
                    self.present.add(instance.worker_id)
                case InstanceRemoved(worker_id=worker_id):
                    self.present.remove(worker_id)
                    self.removed.append(worker_id)


def run(scenario, num_workers):
    async def main():
        async with asyncio.TaskGroup() as group, AsyncExitStack() as stack:
            cluster = Cluster(stack, group)
            await cluster.start(num_workers)
            await scenario(cluster)

    run_async(main(), timeout_s=1e6, loop_factory=SimLoop)


@pytest.mark.parametrize(
    ("num_workers", "most_per_s"), [(1, 1), (30, 1), pytest.param(1000, 5, marks=pytest.mark.slow)]
)
def test_workers_write_little_and_no_record_again(num_workers, most_per_s):
    async def scenario(cluster):
        await asyncio.sleep(600)  # until those that came first know how many there are
        at = len(cluster.store.history)
        cluster.writes.clear()
        await asyncio.sleep(600)
        assert cluster.writes.keys() == {"patch"}
        assert num_workers <= cluster.writes["patch"] <= most_per_s * 600
        written = [event.body for event in list(cluster.store.history)[at:]]
        assert not any("annotations" in body["metadata"] for body in written), "watchers are sent no record"
        assert max(len(json.dumps(body)) for body in written) < 1500
        assert cluster.present == cluster.clients.keys()
        assert not cluster.removed

    run(scenario, num_workers)


@pytest.mark.parametrize("num_workers", [2, 30])
def test_a_worker_that_dies_goes_and_its_leases_and_no_other(num_workers):
    async def scenario(cluster):
        await asyncio.sleep(300)
        dead, client = next(iter(cluster.clients.items()))
        client.is_cut = True
        await asyncio.sleep(300)
        assert cluster.removed == [dead]
        assert cluster.present == cluster.clients.keys() - {dead}
        kind = cluster.store.kinds.find("coordination.k8s.io", "v1", "leases")
        assert len(cluster.store.all(kind)) == 2 * (num_workers - 1)

    run(scenario, num_workers)


STRANGE = (None, True, -3, 2**70, 1.5, "x", [1], {"a": 1})


def test_leases_of_strangers_and_malformed_ones_end_nobody():
    """Names that are no worker's, also other spellings of a living one's; each field of any type."""

    async def scenario(cluster):
        kind = cluster.store.kinds.find("coordination.k8s.io", "v1", "leases")
        number = f"{min(cluster.clients):x}"
        names = [f"{each}-{count}" for count in range(len(STRANGE)) for each in ("penstock-start", "other")]
        for prefix in ("penstock-worker-", "penstock-record-"):
            names += [
                prefix + each
                for each in ("", "-1", f"0{number:0>16}", "f" * 16, "f" * 40, number.upper() + "x")
            ]
            names += [prefix + f"{count + 99:016x}" for count in range(len(STRANGE))]
        for name, value in zip(names, itertools.cycle(STRANGE), strict=False):
            spec = dict.fromkeys(("renewTime", "leaseDurationSeconds", "holderIdentity"), value)
            notes = {"penstock.dev/registration": value, "penstock.dev/refused-start": value}
            labels = {"penstock.dev/deployment": "suite"}
            text = isinstance(value, str)
            metadata = {"name": name, "labels": labels} | ({"annotations": notes} if text else {})
            body = {
                "apiVersion": "coordination.k8s.io/v1",
                "kind": "Lease",
                "metadata": metadata,
                "spec": spec,
            }
            cluster.store.create(kind, "default", body, Manager("stranger", "Update"))
        await asyncio.sleep(60)
        cluster.store.compact()  # all are listed
        await asyncio.sleep(300)
        for name in names:
            with suppress(Refused):
                cluster.store.delete(kind, ("default", name), {})
        await asyncio.sleep(60)
        assert cluster.present == cluster.clients.keys()
        assert not cluster.removed

    run(scenario, 2)


@pytest.mark.parametrize("verb", ["create", "patch", "get", "list"])
def test_a_refused_lease_stops_no_other(verb):
    """One process has three workers; the Leases of one are refused, or how many there are."""

    async def scenario(cluster):
        client, discovery = await cluster.process(9)
        instances = [scripted_instance(f"tcp://10.9.0.{number}:1") for number in range(3)]
        chosen, *others = instances if verb == "create" else reversed(instances)
        names = [f"penstock-{each}-{chosen.worker_id:016x}" for each in ("worker", "record")]
        if verb == "create":
            client.refused = {(verb, name) for name in names}
        registering = [asyncio.create_task(discovery.register(each)) for each in instances]
        failed = [
            each
            for each in await asyncio.gather(*registering, return_exceptions=True)
            if isinstance(each, Exception)
        ]
        assert len(failed) == (verb == "create")
        client.refused = {(verb, name) for name in names} if verb != "list" else {(verb, "")}
        await asyncio.sleep(300)
        assert cluster.present >= {each.worker_id for each in others}
        client.refused = set()

    run(scenario, 1)


@pytest.mark.parametrize("num_workers", [2, 30])
def test_an_api_server_that_forgets_loses_nobody(num_workers):
    """All Leases go at once, and some one by one, records and others, while their workers live."""

    async def scenario(cluster):
        await asyncio.sleep(300)
        cluster.store.forget()
        await asyncio.sleep(300)
        kind = cluster.store.kinds.find("coordination.k8s.io", "v1", "leases")
        for stored in cluster.store.all(kind)[::3]:
            cluster.store.delete(kind, ("default", stored.body["metadata"]["name"]), {})
        await asyncio.sleep(300)
        assert not cluster.removed
        assert cluster.present == cluster.clients.keys()
        assert len(cluster.store.all(kind)) == 2 * num_workers

    run(scenario, num_workers)
