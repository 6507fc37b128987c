"""Which endpoint is used after calls that fail."""

import asyncio
import socket

from penstock.core.errors import Unavailable
from penstock.runtime.discovery.etcd import EtcdClient


async def test_calls_that_fail_together_move_on_by_one_endpoint():
    with socket.socket() as unheard:  # bound, and nobody listens
        unheard.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{unheard.getsockname()[1]}"
        async with EtcdClient([dead, "http://second", "http://third"], timeout_s=5.0) as client:
            results = await asyncio.gather(*(client.read(b"/a") for _ in range(2)), return_exceptions=True)
            assert all(isinstance(each, Unavailable) and dead in each.message for each in results)
            assert all(each.message.endswith("; is etcd running there?") for each in results)
            assert client.url == "http://second"
