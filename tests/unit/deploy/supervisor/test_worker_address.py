import asyncio
from contextlib import AsyncExitStack

import pytest

from penstock.core.errors import ConfigError
from penstock.deploy.supervisor.common import _start_hub, worker_address
from penstock.graph.runtime import RuntimeSpec
from penstock.runtime.handshake import Identity


@pytest.mark.parametrize(
    ("fields", "address"),
    [
        ({}, ("", "")),
        ({"listen": "tcp://10.0.0.5:0"}, ("tcp://10.0.0.5:0", "")),
        ({"listen": "tcp://0.0.0.0:0", "advertise": "gpu-5"}, ("tcp://0.0.0.0:0", "gpu-5")),
        ({"hub": "tcp://10.0.0.1:7400"}, ("tcp://10.0.0.1:0", "")),
        ({"join": "tcp://127.0.0.1:7400"}, ("tcp://127.0.0.1:0", "")),
        ({"join": "tcp://127.0.0.1:7400", "listen": "tcp://10.0.0.5:0"}, ("tcp://10.0.0.5:0", "")),
    ],
)
def test_workers_listen_where_others_reach_them(fields, address):
    assert worker_address(RuntimeSpec(**fields)) == address


@pytest.mark.parametrize("fields", [{"listen": "tcp://0.0.0.0:0"}, {"hub": "tcp://[::]:7400"}])
def test_every_address_is_none_to_register(fields):
    with pytest.raises(ConfigError, match=r"set runtime.advertise"):
        worker_address(RuntimeSpec(**fields))


def test_a_hub_at_the_address_of_another_host_names_join():
    async def start():
        async with AsyncExitStack() as stack:
            spec = RuntimeSpec(hub="tcp://192.0.2.1:7400")
            await _start_hub(spec, Identity(secret=b"s" * 16, hash_key=b"k" * 16), "", stack)

    with pytest.raises(
        ConfigError, match=r"runtime.hub: tcp://192.0.2.1:7400: cannot listen: .*--join tcp://192.0.2.1:7400"
    ):
        asyncio.run(start())
