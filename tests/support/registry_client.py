"""A process that uses a registry: `python -m tests.support.registry_client WHAT DISCOVERY URL [NUMBER]`.

`watch` prints the numbers of the workers that it sees, as JSON, at every change; `member` registers a worker of that number and
prints `registered`; `serve` is the tests' API server itself, or a hub, at that URL.
"""

import asyncio
import json
import random
import sys
from contextlib import AbstractAsyncContextManager
from urllib.parse import urlsplit

from penstock.core.types.instances import InstancePut, InstanceRemoved
from penstock.runtime.config import DiscoveryConfig
from penstock.runtime.discovery.etcd import EtcdDiscovery
from penstock.runtime.discovery.kubernetes import KubernetesDiscovery
from penstock.runtime.discovery.local import LocalDiscovery, LocalHub
from penstock.runtime.discovery.nats import NatsDiscovery
from penstock.runtime.handshake import Identity
from penstock.runtime.kubernetes import KubernetesAccess, KubernetesClient
from penstock.seams import Discovery
from penstock.testing.planes.scripted_worker import scripted_instance
from tests.support.kubernetes.api_server import ApiServer

IDENTITY = Identity(process="suite", secret=b"of the suite")
CONFIG = DiscoveryConfig(lease_ttl_s=3.0)
NAMESPACE = "suite"


def client(discovery: str, url: str) -> AbstractAsyncContextManager[Discovery]:
    rng = random.Random(1)
    match discovery:
        case "etcd":
            return EtcdDiscovery([url], IDENTITY, namespace=NAMESPACE, rng=rng, config=CONFIG)
        case "nats":
            return NatsDiscovery([url], IDENTITY, namespace=NAMESPACE, rng=rng, config=CONFIG)
        case "kubernetes":
            access = KubernetesAccess(url, namespace="default", token="suite-token")
            api = KubernetesClient(access, timeout_s=CONFIG.connect_timeout_s)
            return KubernetesDiscovery(api, IDENTITY, namespace=NAMESPACE, rng=rng, config=CONFIG)
        case _:
            return LocalDiscovery(url, IDENTITY, rng=rng, config=CONFIG)


async def watch(discovery: str, url: str) -> None:
    present = set()
    async with client(discovery, url) as registry:
        async for change in registry.watch():
            match change:
                case InstancePut(instance=instance):
                    present.add(int(instance.worker_id))
                case InstanceRemoved(worker_id=worker_id):
                    present.discard(int(worker_id))
            print(json.dumps(sorted(present)), flush=True)


async def member(discovery: str, url: str, number: str) -> None:
    async with client(discovery, url) as registry:
        await registry.register(scripted_instance("tcp://127.0.0.1:1", worker_id=int(number)))
        print("registered", flush=True)
        await asyncio.Event().wait()


async def serve(discovery: str, url: str) -> None:
    at = urlsplit(url)
    if discovery == "kubernetes":
        async with ApiServer(host=at.hostname or "", port=at.port or 0):
            await asyncio.Event().wait()
    else:
        await LocalHub(IDENTITY, listen=url, config=CONFIG).start()
        await asyncio.Event().wait()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["watch", discovery, url]:
            asyncio.run(watch(discovery, url))
        case ["member", discovery, url, number]:
            asyncio.run(member(discovery, url, number))
        case ["serve", discovery, url]:
            asyncio.run(serve(discovery, url))
